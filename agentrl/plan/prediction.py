"""Puts the parts of a step together, and tries splits of the cards.

Guarantees: pure; of the splits that fit, the shortest step is chosen, and of those within 2% the one with most trainer
ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentrl.config.errors import ConfigError
from agentrl.config.mesh import MeshConfig
from agentrl.plan.memory import GB, Item, server_memory, total, trainer_memory
from agentrl.plan.mesh import Mesh, decided, mesh_of
from agentrl.plan.times import (
    OPTIMIZER_BYTES,
    TERA,
    Case,
    Layout,
    Part,
    at_a_time,
    bound,
    compute_seconds,
    decode_seconds,
    evaluation_seconds,
    exchange_seconds,
    generation_seconds,
    microbatches,
    optimizer_seconds,
    passes,
    prefill_seconds,
    push_seconds,
    pushed_bytes,
    scoring_seconds,
)

CLOSE = 1.02  # steps this near to the shortest are equally good


@dataclass(frozen=True)
class Prediction:
    """A step under one layout.

    Attributes:
        layout: Who does what.
        parts: Parts of the step, in their order.
        seconds: Seconds of the step.
        overlap: Whether servers and trainer work side by side.
        trainer: Memory of a trainer rank.
        server: Memory of a server's card.
        memory: Bytes that a card has.
        server_room: Bytes that a server may take.
    """

    layout: Layout
    parts: tuple[Part, ...]
    seconds: float
    overlap: bool
    trainer: tuple[Item, ...]
    server: tuple[Item, ...]
    memory: float
    server_room: float

    def side(self, name: str) -> float:
        """Returns the seconds of one side's parts, ``serve`` or ``train``."""
        return sum(part.seconds for part in self.parts if part.side == name)

    @property
    def beside(self) -> float:
        """Bytes that a server takes on the trainer's card."""
        return total(self.server) if self.layout.shared else 0.0

    @property
    def trainer_fits(self) -> bool:
        """Whether a trainer rank fits its card, beside the server where both share it."""
        return total(self.trainer) + self.beside <= self.memory

    @property
    def server_fits(self) -> bool:
        """Whether a server fits its cards."""
        return total(self.server) <= self.server_room

    @property
    def fits(self) -> bool:
        """Whether everything fits."""
        return self.trainer_fits and self.server_fits


def predict(case: Case, layout: Layout) -> Prediction:
    """Predicts a step of a case under one layout; whether layers are freed follows from the recipe and the memory."""
    recipe, known, beside = case.recipe, case.known, 0.0
    if layout.shared:
        here = at_a_time(case, layout)
        beside = total(server_memory(recipe, case.decoder, layout.server_cards, known, here, case.work.context))
    free = known["memory_gb"] * GB - beside
    layout = replace(layout, mesh=decided(layout.mesh, recipe.trainer, case.decoder, free))
    parts = (*_serving(case, layout), *_training(case, layout))
    overlap = bound(case.recipe) > 0 and not layout.shared
    serve = sum(part.seconds for part in parts if part.side == "serve")
    train = sum(part.seconds for part in parts if part.side == "train")
    here = at_a_time(case, layout)  # no more than a cache that grows has room for
    return Prediction(
        layout,
        parts,
        max(serve, train) if overlap else serve + train,
        overlap,
        tuple(trainer_memory(recipe, case.decoder, layout.mesh, known, updates=microbatches(case, layout.mesh))),
        tuple(server_memory(recipe, case.decoder, layout.server_cards, known, here, case.work.context)),
        known["memory_gb"] * GB,
        known["memory_gb"] * GB * known["server_share"],
    )


def _serving(case: Case, layout: Layout) -> Iterator[Part]:
    work, here = case.work, at_a_time(case, layout)
    step = decode_seconds(case, here, layout.server_cards)
    yield Part(
        "prompts", prefill_seconds(case, layout), "serve",
        f"{work.groups:g} groups x {work.prompt:,.0f} tokens, on up to {min(work.members, layout.servers):g} servers",
    )  # fmt: skip
    yield Part(
        "generation", generation_seconds(case, layout), "serve",
        f"{work.sampled:,.0f} tokens; {here:,.0f} at a time on a server, {step * 1e3:,.1f} ms a token",
    )  # fmt: skip
    every = case.recipe.eval.every
    if every:
        once = evaluation_seconds(case, layout)
        yield Part("evaluation", once / every, "serve", f"{once:,.1f} s every {every} steps")


def _training(case: Case, layout: Layout) -> Iterator[Part]:
    work, mesh = case.work, layout.mesh
    tokens = work.episodes * (work.prompt + work.answer + work.observation)
    controller = case.known["controller_s_per_mtoken"] * tokens / 1e6
    yield Part("batch", controller, "train", "from finished episodes to micro-batches")
    if names := passes(case):
        yield Part("scoring", scoring_seconds(case, mesh), "train", f"forward passes for {', '.join(names)}")
    rounds = microbatches(case, mesh)
    flops = 3 * case.decoder.forward_flops(work.computed, work.predicted, work.pairs)
    yield Part(
        "update", compute_seconds(case, mesh), "train",
        f"{work.computed:,.0f} tokens, {flops / TERA:,.4g} TFLOP, {rounds:g} micro-batches on each rank",
    )  # fmt: skip
    if mesh.ranks > 1:
        yield Part("exchange", exchange_seconds(case, mesh), "train", "parameters gathered, gradients reduced")
    yield Part(
        "optimizer", optimizer_seconds(case, mesh), "train", f"clipping and AdamW, {OPTIMIZER_BYTES} bytes a parameter"
    )
    nbytes = pushed_bytes(case)
    yield Part("push", push_seconds(case, layout), "train", f"{nbytes / GB:,.3g} GB to {layout.servers} servers")


def layouts(
    gpus: int, server_cards: int, most_ranks: int, per_machine: int, config: MeshConfig | None = None
) -> list[Layout]:
    """Returns all splits of the cards: any within a machine, whole machines beyond.

    Args:
        gpus: All cards.
        server_cards: Cards of a server.
        most_ranks: Most trainer ranks that compute different rows.
        per_machine: Cards of a machine.
        config: The trainer's section, which arranges its ranks; by default all are shards.

    Raises:
        ConfigError: No split is possible.
    """
    config = config or MeshConfig()
    fixed = config.replicas * config.context_parallel * config.tensor_parallel
    if gpus == 1:
        if fixed * config.expert_parallel * server_cards > 1:
            raise ConfigError("--gpus 1 has no room for a mesh of several ranks or servers of several cards")
        return [Layout(1, 1, Mesh(), shared=True)]
    step = per_machine if gpus > per_machine and gpus % per_machine == 0 else 1
    found = []
    for serving in range(step, gpus, step):
        training = gpus - serving
        rows = training // fixed * config.replicas
        if serving % server_cards or training % fixed or not 0 < rows <= most_ranks:
            continue
        if training // config.replicas % config.expert_parallel:
            continue
        found.append(Layout(serving // server_cards, server_cards, mesh_of(config, training)))
    if not found:
        raise ConfigError(
            f"no split of {gpus} cards: servers take {server_cards} each, the trainer multiples of {fixed} (its mesh), "
            f"and at most {most_ranks} of its ranks get rows (rollout.batch_size * rollout.group_size); machines have "
            f"{per_machine}"
        )
    return found


def choose(found: Sequence[Prediction]) -> Prediction:
    """Returns the best prediction; if none fits, the one that exceeds the memory least."""
    fitting = [one for one in found if one.fits]
    if not fitting:
        return min(found, key=lambda one: max(total(one.trainer) / one.memory, total(one.server) / one.server_room))
    shortest = min(one.seconds for one in fitting)
    near = [one for one in fitting if one.seconds <= shortest * CLOSE]
    return max(near, key=lambda one: one.layout.mesh.ranks)
