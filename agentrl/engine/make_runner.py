"""Makes the runner that fits a model: shared slots where its own forward pass agrees with them, else its own caches."""

import logging
from typing import Any

import torch

from agentrl.engine import KEPT_TOKENS
from agentrl.engine.cache_support import wrong_cache
from agentrl.engine.cohorts import CohortRunner
from agentrl.engine.expert_record import ExpertRecord
from agentrl.engine.model import LoadedModel, ModelError
from agentrl.engine.runner import ModelRunner
from agentrl.models.probe import COARSE, FAULTS, TOLERANCE
from agentrl.models.routing import NoRouters
from agentrl.models.tree_support import ids_of

Runner = ModelRunner | CohortRunner
log = logging.getLogger(__name__)
TRIED = 9  # tokens of the trial


def make_runner(
    loaded: LoadedModel, max_running: int, kept_tokens: int = KEPT_TOKENS, *, compiled: bool = True,
    experts: bool = False,
) -> Runner:  # fmt: skip
    """Makes the runner of a model, and says so where it is not the fast one.

    Args:
        loaded: The model.
        max_running: Number of slots.
        kept_tokens: Most tokens whose keys and values are kept for later prompts.
        compiled: Whether a compiler is used where there is one.
        experts: Whether answers may be asked for the experts of each token.

    Raises:
        ModelError: They may, and the model has no experts that can be named.
    """
    record = expert_record(loaded.model) if experts else None
    past, why = loaded.past, loaded.why
    if past == "slots":
        try:
            runner = ModelRunner(loaded, max_running, kept_tokens, compiled=compiled, experts=record)
            wrong = None if runner.fast is not None else wrong_slots(runner)
        except FAULTS as error:
            wrong = f"slots cannot hold its past ({type(error).__name__}: {error})"
        else:
            if wrong is None:
                return runner
        why, past = wrong, "recomputed" if wrong_cache(loaded.model) else "caches"
    how = "transformers' own caches" if past == "caches" else "no cache: each step computes the whole sequence"
    name = type(loaded.model).__name__
    log.warning("%s is served with %s, which is slower, because %s", name, how, why)
    return CohortRunner(loaded, cached=past == "caches", experts=record)


def expert_record(model: Any) -> ExpertRecord:
    """Makes the record of a model's experts.

    Raises:
        ModelError: It has none that can be named.
    """
    try:
        return ExpertRecord(model)
    except NoRouters as error:
        raise ModelError(f"--enable-return-routed-experts (trainer.replay_routing): {error}") from error


@torch.inference_mode()
def wrong_slots(runner: ModelRunner) -> str | None:
    """Returns what is wrong with a model's own forward pass over the slots; ``None`` if the logits are right."""
    ids = ids_of(runner.loaded.model, TRIED)
    first, second = ids[:-2], [*ids[:-3], ids[-1]]
    found = [runner.prefill([first, second], [[0], [1]]), runner.decode([ids[-2]] * 2, [len(first)] * 2)]
    runner.clear()
    runner.prefills = runner.prefilled_tokens = runner.decodes = runner.decoded_rows = 0
    rows = torch.tensor([[*first, ids[-2]], [*second, ids[-2]]], device=runner.loaded.device)
    expected = runner.loaded.model(input_ids=rows, use_cache=False).logits[:, -2:].float().transpose(0, 1)
    gap = ((torch.stack(found) - expected).abs().mean() / expected.abs().mean()).item()
    if gap <= TOLERANCE.get(runner.loaded.model.dtype, COARSE):  # false for NaN
        return None
    return f"its logits over shared slots differ from its forward pass (by {gap:.1%} on average)"
