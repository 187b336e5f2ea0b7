"""Predicts the seconds of a step, part by part.

Guarantees: pure. A decode step takes the longer of reading and computing, plus the reading of keys and values. Without
staleness the parts follow one another; with it, generation and training go on side by side, and the longer one is the
step.
"""

from dataclasses import dataclass

from agentrl.config.recipe import Recipe
from agentrl.models.sizes import Decoder
from agentrl.plan.assumptions import Assumptions
from agentrl.plan.memory import BYTES, GB, PAGED, cache_tokens, microbatch_tokens
from agentrl.plan.mesh import Mesh
from agentrl.plan.work import Work, makespan, spread

TERA = 1e12
MOST_PLAYED = 2048  # sequences of one server whose ends are played one by one
REPEATS = 6  # of a fixed point
OPTIMIZER_BYTES = 40  # of a parameter: norm 4, clip 8, AdamW 28 (reads four float32 values, writes three)


@dataclass(frozen=True)
class Layout:
    """Who does what.

    Attributes:
        servers: Inference servers.
        server_cards: Cards of a server.
        mesh: The trainer's mesh.
        shared: Whether servers and trainer take turns on the same cards.
    """

    servers: int
    server_cards: int
    mesh: Mesh
    shared: bool = False

    @property
    def cards(self) -> int:
        """All cards."""
        serving = self.servers * self.server_cards
        return max(serving, self.mesh.ranks) if self.shared else serving + self.mesh.ranks


@dataclass(frozen=True)
class Case:
    """Case that a prediction is made for."""

    recipe: Recipe
    decoder: Decoder
    work: Work
    known: Assumptions


@dataclass(frozen=True)
class Part:
    """Part of a step.

    Attributes:
        name: Name of the part.
        seconds: Seconds that the part takes.
        side: ``serve`` or ``train``: who is busy with it.
        how: The figures that it follows from.
    """

    name: str
    seconds: float
    side: str
    how: str


def decode_seconds(case: Case, sequences: float, cards: int = 1) -> float:
    """Returns the seconds of a token of a server with so many sequences at a time."""
    known, decoder, width = case.known, case.decoder, BYTES[case.recipe.inference.dtype]
    rows = max(1.0, sequences * known["distinct_rows"])
    bandwidth = known["bandwidth_gbs"] * GB * known["mbu"] * cards
    compute = known["serving_tflops"] * TERA * known["decode_mfu"] * cards
    reading = decoder.read(rows) * width / bandwidth
    computing = decoder.forward_flops(rows, rows, rows * case.work.context) / compute
    cache = rows * case.work.context * decoder.kv_bytes(width) / bandwidth
    step = known["decode_step_ms"] / 1e3
    if cards > 1:  # two sums over the cards in each layer
        link = known["link_gbs"] * GB * known["link_share"]
        step += 2 * decoder.layers * rows * decoder.hidden * width * 2 * (cards - 1) / cards / link
    return max(reading, computing) + cache + step


def prefill_seconds(case: Case, layout: Layout) -> float:
    """Returns the seconds of a step's prompts and observations, spread over all servers."""
    work, known = case.work, case.known
    copies = min(work.members, layout.servers)  # members of a group go to the least loaded servers
    prompts = work.groups * copies
    tokens = prompts * (work.prompt - work.shared) + layout.servers * work.shared + work.episodes * work.observation
    pairs = prompts * (work.prompt**2 - work.shared**2) / 2 + work.episodes * work.observation * work.context
    rate = known["serving_tflops"] * TERA * known["prefill_mfu"] * layout.servers * layout.server_cards
    return case.decoder.forward_flops(tokens, prompts, pairs) / rate


def at_a_time(case: Case, layout: Layout) -> float:
    """Returns the sequences that a server decodes at a time when ``rollout.max_concurrent`` episodes are in flight."""
    limit = float(case.recipe.inference.max_running)
    if case.recipe.inference.engine in PAGED:
        room = cache_tokens(case.recipe, case.decoder, layout.server_cards, case.known)
        limit = max(1.0, min(limit, room / case.work.context))
    flying = case.recipe.rollout.max_concurrent
    if bound(case.recipe) == 0:
        flying = min(flying, case.work.episodes)
    each = flying / layout.servers
    here = min(limit, each)
    for _ in range(REPEATS):  # episodes that are in their environment do not decode
        busy = case.work.answer * decode_seconds(case, here, layout.server_cards)
        here = max(min(limit, each * busy / (busy + case.work.outside)), min(1.0, each))
    return here


def bound(recipe: Recipe) -> int:
    """Returns the recipe's bound of the age; ``auto`` counts as 1."""
    found = recipe.rollout.max_staleness
    return 1 if found == "auto" else found


def generation_seconds(case: Case, layout: Layout) -> float:
    """Returns the seconds in which the servers sample a step's episodes, without prompts.

    With staleness several batches are under way at a time. A batch is complete with its longest episode, so a step
    takes no less than that episode's time over the number of batches, and no less than all tokens at full load.
    """
    here, work = at_a_time(case, layout), case.work
    count = max(1, round(work.episodes / layout.servers))
    played = min(count, MOST_PLAYED)
    lengths = spread(work.lengths, played)
    if bound(case.recipe) == 0:
        slots, scale = max(1, round(here * played / count)), count / played
        once = makespan(lengths, slots, lambda running: decode_seconds(case, running * scale, layout.server_cards))
        return once + work.outside
    step = decode_seconds(case, here, layout.server_cards)
    batches = min(bound(case.recipe) + 1, max(1.0, case.recipe.rollout.max_concurrent / work.episodes))
    longest = max(spread(work.lengths, min(MOST_PLAYED, max(1, round(work.episodes)))))
    return max(work.sampled / (layout.servers * here) * step, (longest * step + work.outside) / batches)


def passes(case: Case) -> dict[str, float]:
    """Returns forward passes over a step's tokens for scoring, beside the update, by what needs them."""
    trainer = case.recipe.trainer
    found: dict[str, float] = {}
    if trainer.proximal == "recomputed":
        found["proximal"] = 1.0
    if trainer.kl_coef > 0:
        found["reference"] = 1.0
    if trainer.advantage == "gae":
        found["critic"] = 4.0  # values before, and its own update
    idle = 1 - case.work.signal if trainer.metric_share else 0.0
    if idle:
        found["metrics"] = trainer.metric_share
    return found


def predicted_by(case: Case, mesh: Mesh) -> float:
    """Returns the tokens that go through the head on all ranks: each rank of a tensor group computes all of its own."""
    return case.work.predicted * mesh.tensor


def train_rate(case: Case, mesh: Mesh) -> float:
    """Returns the FLOP/s of all ranks together in an update."""
    return case.known["peak_tflops"] * TERA * case.known["mfu"] * mesh.ranks


def scoring_seconds(case: Case, mesh: Mesh) -> float:
    """Returns the seconds of the forward passes beside the update."""
    work, total = case.work, sum(passes(case).values())
    if not total:
        return 0.0
    flops = case.decoder.forward_flops(work.computed, predicted_by(case, mesh), work.pairs)
    rate = case.known["peak_tflops"] * TERA * case.known["prefill_mfu"] * mesh.ranks
    return total * flops / rate


def compute_seconds(case: Case, mesh: Mesh) -> float:
    """Returns the seconds of an update's forward and backward passes."""
    work, trainer, decoder = case.work, case.recipe.trainer, case.decoder
    predicted = predicted_by(case, mesh)
    flops = 3 * decoder.forward_flops(work.computed, predicted, work.pairs)
    if trainer.gradient_checkpointing:
        flops += decoder.forward_flops(work.computed, 0, work.pairs)
    if trainer.ratio == "sequence" or trainer.correction_level == "sequence" or trainer.reject_by is not None:
        flops += 2 * decoder.head * predicted  # the logits once more
    return flops / train_rate(case, mesh)


def microbatches(case: Case, mesh: Mesh) -> float:
    """Returns the micro-batches of a step on each rank, at least one for each update."""
    trainer = case.recipe.trainer
    each = case.work.computed / mesh.rows / trainer.minibatches
    return trainer.minibatches * max(1.0, -(-each // microbatch_tokens(case.recipe, mesh)))


def exchange_seconds(case: Case, mesh: Mesh) -> float:
    """Returns the seconds in which parameters are gathered and gradients reduced, none of it hidden behind compute."""
    known, trainer, decoder = case.known, case.recipe.trainer, case.decoder
    group = mesh.shards * mesh.context
    whole = mesh.whole(decoder)
    updates, rounds = trainer.minibatches, microbatches(case, mesh)
    seconds = 0.0
    if group > 1:
        speed = _between(known, group * mesh.tensor)
        times = 2 * rounds if mesh.reshard else updates
        reduced = rounds if mesh.reshard else updates
        nbytes = (times * BYTES[trainer.dtype] + (reduced * 4 if trainer.lora_rank is None else 0)) * whole
        seconds += nbytes * (group - 1) / group / speed
    if mesh.replicas > 1 and trainer.lora_rank is None:
        nbytes = updates * 2 * 4 * whole / group
        seconds += nbytes * (mesh.replicas - 1) / mesh.replicas / _between(known, mesh.ranks)
    passed = 3 if trainer.gradient_checkpointing else 2  # forward and backward, and forward again
    if mesh.tensor > 1:  # two sums of the hidden states in each layer and pass
        nbytes = 2 * passed * decoder.layers * case.work.computed / mesh.rows / mesh.context * decoder.hidden
        nbytes *= 2 * BYTES[trainer.dtype] * (mesh.tensor - 1) / mesh.tensor
        seconds += nbytes / _between(known, mesh.tensor)
    if mesh.context > 1:  # keys and values of a row, gathered forward and reduced backward
        width = 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * BYTES[trainer.dtype] / mesh.tensor
        nbytes = passed * width * case.work.computed / mesh.rows
        seconds += nbytes * (mesh.context - 1) / mesh.context / _between(known, mesh.context * mesh.tensor)
    if mesh.expert > 1:  # hidden states to the experts and back in each pass
        nbytes = 2 * passed * decoder.sparse_layers * decoder.experts_used * decoder.hidden * BYTES[trainer.dtype]
        nbytes *= case.work.computed / mesh.rows / mesh.context / mesh.tensor
        seconds += nbytes * (mesh.expert - 1) / mesh.expert / _between(known, mesh.expert)
    return seconds


def _between(known: Assumptions, ranks: int) -> float:
    """Returns bytes per second of a rank to so many others: within a machine, or beyond."""
    name = "link_gbs" if ranks <= known["gpus_per_machine"] else "network_gbs"
    return known[name] * GB * known["link_share"]


def optimizer_seconds(case: Case, mesh: Mesh) -> float:
    """Returns the seconds of AdamW and of clipping: memory traffic alone."""
    trainer = case.recipe.trainer
    adapter = (trainer.lora_rank or 0) * case.decoder.linear_sides / mesh.owners
    own = mesh.own(case.decoder) if trainer.lora_rank is None else adapter
    nbytes = trainer.minibatches * OPTIMIZER_BYTES * own
    speed = known_host(case) if trainer.cpu_offload else case.known["bandwidth_gbs"] * GB * case.known["mbu"]
    return nbytes / speed


def known_host(case: Case) -> float:
    """Returns bytes per second between a card and its host."""
    return case.known["host_gbs"] * GB * case.known["link_share"]


def pushed_bytes(case: Case) -> float:
    """Returns the bytes of a weight push."""
    trainer = case.recipe.trainer
    if trainer.lora_rank is not None and trainer.lora_push == "adapter":
        return 4 * trainer.lora_rank * case.decoder.linear_sides
    return BYTES[case.recipe.inference.dtype] * case.decoder.parameters


def push_seconds(case: Case, layout: Layout) -> float:
    """Returns the seconds of a push: gathered on rank 0, written or sent, and loaded by the servers."""
    nbytes, known, mesh = pushed_bytes(case), case.known, layout.mesh
    host = known_host(case)
    gather = nbytes * (mesh.owners - 1) / mesh.owners / _between(known, mesh.owners) if mesh.owners > 1 else 0.0
    far = layout.cards > known["gpus_per_machine"]
    way = nbytes / (known["network_gbs"] * GB * known["link_share"]) if far else nbytes / host
    packed = case.recipe.launch.device == "cpu"  # as the embedded engine does
    return gather + way + nbytes * (2 if packed else 1) / layout.server_cards / host  # into a second layout, too


def evaluation_seconds(case: Case, layout: Layout, held_out: int = 1000) -> float:
    """Returns the seconds of one evaluation on all servers; ``held_out`` tasks where the recipe takes all."""
    evaluation = case.recipe.eval
    tasks = (evaluation.tasks or held_out) * evaluation.samples
    slots = case.recipe.inference.max_running
    here = max(1.0, min(slots, tasks / layout.servers))
    step = decode_seconds(case, here, layout.server_cards)
    longest = max(case.work.lengths)
    waves = max(1.0, tasks / layout.servers / here)
    prompts = case.decoder.forward_flops(tasks * case.work.prompt, tasks, tasks * case.work.prompt**2 / 2)
    rate = case.known["serving_tflops"] * TERA * case.known["prefill_mfu"] * layout.servers * layout.server_cards
    tail = max(0.0, longest - case.work.answer)
    return prompts / rate + (waves * case.work.answer + tail) * step + case.work.outside
