"""Checks a model for a run: tokenizer, chat template, engine, trainer, images, experts, adapters, sharding, memory.

Guarantees: each line is tried, not looked up: the trainer's and the engine's on the model itself if it is small, else
on a small random model of its config; a refusal names its reason and a remedy. ``--json`` and the table say the same.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentrl.core.image_reader import ImageReader, has_image_class
from agentrl.core.images import data_url
from agentrl.core.message_shape import ImageRefused
from agentrl.core.model_files import (
    COPY,
    Unreadable,
    end_ids,
    one_line,
    read_config,
    read_object,
    read_tokenizer,
    unreadable,
)
from agentrl.launch.model_shape import shape_of_folder, shape_of_weights
from agentrl.models.folder_check import (
    RESIZE,
    embedding_rows,
    refused_folder,
    tokens_without_row,
    too_many_tokens,
)

Verdict = Literal["ok", "slower", "refused"]
SMALL = 300_000_000  # parameters up to which the model itself is tried
TRAINED_BYTES = 16  # of a parameter: itself, its gradient and two moments, float32
GIB = 2**30
TEXTS = (
    "Hello, world!",
    "  two  spaces\n\n\tand a tab",
    "naïve Zürich 東京 🙂",
    'def f(x):\n    return {"a": [1, 2.5]}',
)
DEFAULT_CONTEXT = 4096
PICTURE = (112, 56)  # pixels of the image that a model is asked about
TOKENIZER = ("tokenizer*", "vocab*", "*.model", "merges.txt")  # files of a tokenizer, one of which each has


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        part: Part of agentrl, or of the model, that was tried.
        verdict: ``ok``, ``slower`` (works, in a slower way) or ``refused``.
        text: Result of the check.
        remedy: Advice; empty if nothing needs to be done.
        data: Values for the JSON object.
    """

    part: str
    verdict: Verdict
    text: str
    remedy: str = ""
    data: dict[str, Any] = field(default_factory=dict)


def report(folder: Path, context: int = 0, *, trust: bool = False) -> list[Line]:
    """Tries a model with all that a run needs of it.

    Args:
        folder: Folder of the model.
        context: Longest sequence in tokens; 0: the model's own, at most :data:`DEFAULT_CONTEXT`.
        trust: Whether code that comes with the model may run.
    """
    lines = list(_tokenizer(folder, trust))
    if lines[0].verdict != "refused":
        lines += _template(folder, trust)
    if why := refused_folder(folder):
        return [*lines, *(Line(part, "refused", *_parted(why)) for part in ("trainer", "embedded engine"))]
    return [*lines, *_computed(folder, context, trust), *_memory(folder, trust)]


def _tokenizer(folder: Path, trust: bool) -> Iterator[Line]:
    if not any(next(folder.glob(pattern), None) for pattern in TOKENIZER):
        yield Line("tokenizer", "refused", f"{folder} has no files of a tokenizer", COPY)
        return
    try:
        tokenizer: Any = read_tokenizer(folder, trust=trust)
    except Unreadable as error:
        yield Line("tokenizer", "refused", *_parted(error))
        return
    wrong = [text for text in TEXTS if tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) != text]
    text = f"{len(tokenizer)} tokens; "
    text += (
        f"{len(wrong)} of {len(TEXTS)} texts are not decoded as they were" if wrong else "texts survive a round trip"
    )
    remedy = "stored ids are never encoded again, so training is not affected; rewards see the decoded text"
    yield Line("tokenizer", "slower" if wrong else "ok", text, remedy if wrong else "")
    yield from _sizes(folder, tokenizer)
    try:
        ends = _end_tokens(folder, tokenizer)
    except Unreadable as error:
        yield Line("end tokens", "refused", *_parted(error))
        return
    if not ends:
        text, remedy = "no end token: answers would never end", "set eos_token_id in generation_config.json"
        yield Line("end tokens", "refused", text, remedy)
    else:
        named = ", ".join(f"{tokenizer.convert_ids_to_tokens(one)!r} ({one})" for one in ends)
        pad = "no pad token, and none is needed" if tokenizer.pad_token_id is None else f"pad {tokenizer.pad_token!r}"
        yield Line("end tokens", "ok", f"{named}; {pad}", data={"end_tokens": ends})


def _sizes(folder: Path, tokenizer: Any) -> Iterator[Line]:
    """Compares the tokenizer with the embedding, whose rows the config names."""
    rows = embedding_rows(folder)
    if not rows:
        return
    ordinary, special = tokens_without_row(tokenizer, rows)
    if ordinary:
        yield Line("vocabulary", "refused", too_many_tokens(ordinary, rows).removesuffix(f": {RESIZE}"), RESIZE)
        return
    spare = rows - len(tokenizer)
    text = f"{rows} rows in the embedding" + (f", {spare} of them without a token" if spare > 0 else "")
    if special:
        text += f"; none for {', '.join(special[:3])}, so that a prompt with it is refused"
    yield Line("vocabulary", "ok", text)


def _end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        found += end_ids(read_object(folder / name).get("eos_token_id"), str(folder / name))
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(found))


def _parted(error: object) -> tuple[str, str]:
    """Returns the reason and the remedy of a refusal, which its last colon parts."""
    why, _, remedy = str(error).rpartition(": ")
    return (why, remedy) if why else (remedy, "")


def _refused(error: Exception, remedy: str) -> tuple[str, str]:
    """Returns the reason and the remedy of a refusal; ``remedy`` unless files of the model are the reason."""
    return _parted(error) if isinstance(error.__cause__, Unreadable) else (str(error), remedy)


def _template(folder: Path, trust: bool) -> Iterator[Line]:
    from agentrl.core.template_marks import TemplateError
    from agentrl.inference.template import ChatTemplate
    from agentrl.inference.tool_parsers import parser_for

    try:
        template = ChatTemplate.from_folder(folder, trust=trust)
        parser = parser_for(template.source)
        rewrites = template.rewrites([{"role": "user", "content": "a"}])
    except TemplateError as error:
        remedy = "set model.chat_template=chatml_tools, or another template"
        yield Line("chat template", "refused", str(error), remedy, {"chat_template": "refused"})
        return
    except unreadable() as error:
        remedy = "take another template with model.chat_template"
        yield Line("chat template", "refused", one_line(error), remedy, {"chat_template": "refused"})
        return
    notes = "; ".join(template.notes)
    if rewrites:
        text = "earlier turns are rendered differently once a new one follows" + (f"; {notes}" if notes else "")
        remedy = "set inference.history=append or branch, or model.chat_template=training"
        yield Line("chat template", "slower", text, remedy)
    else:
        yield Line("chat template", "ok", notes or "earlier turns stay as they were rendered")
    findings = template.findings(parser)
    missing = any(finding.startswith("refused") for finding in findings)
    thinking = "".join(parser.thinking) if parser.thinking else "of each message's kind"
    text = f"parser {parser.name}; reasoning: {thinking}; {'; '.join(findings)}"
    remedy = "set model.chat_template=chatml_tools, or another template, where a run needs what is refused"
    yield Line("tools", "slower" if missing else "ok", text, remedy if missing else "", {"parser": parser.name})


def _computed(folder: Path, context: int, trust: bool) -> Iterator[Line]:
    """Tries engine and trainer, on the model or on a small random one of its config."""
    original, of = folder, "the model itself"
    context = context or min(_own_context(folder, trust) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    with tempfile.TemporaryDirectory(prefix="agentrl-model-check-") as small:
        if max(_parameters(folder, trust), _asked_for(folder)) > SMALL:
            why = _write_small(folder, Path(small), trust)
            if why is not None:
                yield from (Line(part, "refused", *_parted(why)) for part in ("trainer", "embedded engine"))
                return
            folder, of = Path(small), "a small random model of its config"
        engine = _engine(folder, context, trust, of)
        yield engine
        trainer = list(_trainer(folder, context, trust, of))
        yield from trainer
        yield _images(original, engine, trainer[0], tried=folder == original, trust=trust)


def _parameters(folder: Path, trust: bool) -> int:
    """Returns the number of a model's parameters; 0 if it is not known.

    It is that of its files, but of a composite model that is loaded as text alone, whose files hold more.
    """
    try:
        stored = shape_of_weights(folder).parameters
        if stored and ("text_config" not in _config(folder) or has_image_class(read_config(folder, trust=trust))):
            return stored
    except (OSError, ValueError):
        return 0
    return _asked_for(folder)


def _asked_for(folder: Path) -> int:
    """Returns the number of parameters that a config asks for, whatever its files hold; 0 if it is not known."""
    try:
        return shape_of_folder(folder).parameters
    except (OSError, ValueError):
        return 0


def _own_context(folder: Path, trust: bool) -> int:
    """Returns the longest sequence of a model, of a composite one that of its text part; 0 if none is known."""
    from agentrl.train.policy import ModelRefused, load_config

    try:
        config = load_config(folder, trust=trust).get_text_config(decoder=True)
    except ModelRefused:  # trainer and engine say why
        return 0
    return max(getattr(config, "max_position_embeddings", None) or 0, 0)  # some classes say -1 for any length


def _write_small(folder: Path, target: Path, trust: bool) -> str | None:
    from agentrl.train.model_check import small_model
    from agentrl.train.policy import ModelRefused, load_config

    try:
        model = small_model(load_config(folder, trust=trust))
    except ModelRefused as error:
        return str(error)
    if model is None:
        return "no small model can be made of its config: start a run, which tries the model itself"
    model.save_pretrained(target)
    return None


def _engine(folder: Path, context: int, trust: bool, of: str) -> Line:
    from agentrl.engine.make_runner import make_runner
    from agentrl.engine.model import ModelError, load_without_tokenizer

    try:
        loaded = load_without_tokenizer(str(folder), "float32", "auto", context, trust=trust)
        runner = make_runner(loaded, 4)
    except ModelError as error:
        return Line("embedded engine", "refused", *_refused(error, "serve it with SGLang or vLLM"))
    exact = f"exact to its own forward pass in float32, tried on {of}"
    if runner.past == "slots":
        return Line(
            "embedded engine", "ok", f"shared slots, prompts as prefix trees; {exact}", data={"engine": "trees"}
        )
    how = "transformers' own caches, one for each prompt" if runner.past == "caches" else "no cache, each step is whole"
    remedy = "serve it with SGLang or vLLM where speed matters"
    return Line("embedded engine", "slower", f"{how}; {exact}; {loaded.why}", remedy, {"engine": "padded"})


def _trainer(folder: Path, context: int, trust: bool, of: str) -> Iterator[Line]:
    from agentrl.train.policy import ModelRefused
    from agentrl.train.probe_report import probe_trainer

    try:
        probe = probe_trainer(folder, context, trust=trust)
    except ModelRefused as error:
        yield Line("trainer", "refused", *_refused(error, "take another model"))
        return
    said = ", ".join(f"{gap:.2g} in {dtype}" for dtype, gap in probe.gaps.items())
    text = f"{probe.way}; logprobs differ from its own forward pass by {said} (nats, tried on {of})"
    if probe.fault:
        text += f"; it does not compute in bfloat16, so set trainer.dtype=float32 ({probe.fault})"
    gaps = {dtype: gap for dtype, gap in probe.gaps.items() if math.isfinite(gap)}
    data = {"train": probe.way.rows, "logprob_gap": gaps, "head": str(probe.head)}
    data |= {} if probe.images is None else {"wrong_images": probe.images}
    fine = probe.way.rows == "trees" and not probe.fault
    yield Line("trainer", "ok" if fine else "slower", text, data=data)
    yield Line("head", "slower" if probe.head.own else "ok", str(probe.head))
    replay = "trainer.replay_routing=true replays the server's choice" if probe.replays else "no choice is replayed"
    yield Line("routing", "ok", f"{probe.routing}; {replay}", data={"replay_routing": probe.replays})
    found = ", ".join(probe.lora_targets)
    text, remedy = found or "no linear layers", ""
    if probe.stacked:
        text += f"; none for the experts' stacked weights, {probe.stacked:.0%} of the parameters"
        remedy = "train them without trainer.lora_rank"
    verdict: Verdict = "refused" if not found else "slower" if probe.stacked else "ok"
    yield Line("LoRA targets", verdict, text, remedy, {"lora": found})
    plan = "the class has a plan" if probe.tensor_parallel else "the class has no plan: shard with FSDP2 alone"
    yield Line("tensor parallel", "ok" if probe.tensor_parallel else "slower", plan)


def _images(folder: Path, engine: Line, trainer: Line, *, tried: bool, trust: bool) -> Line:
    """Tells whether a prompt may hold images, by what stands for them, and who takes them.

    Args:
        folder: Folder of the model.
        engine: Line of the embedded engine, which tries an image when it loads a model that takes any.
        trainer: Line of the trainer, which does too.
        tried: Whether both tried the model itself: a small random one has no processor.
        trust: Whether code that comes with the model may run.
    """
    reader, why = ImageReader.find(folder, trust=trust)
    if reader is None and not why:
        return Line("images", "ok", "a model of text: a prompt with an image is refused", data={"images": "none"})
    if reader is None:
        remedy = "take a model whose processor in transformers tells its placeholders (docs/images.md)"
        return Line("images", "refused", why, remedy, {"images": "refused"})
    from PIL import Image

    url = data_url(Image.new("RGB", PICTURE, (90, 120, 150)))
    text = (
        f"{reader.name} puts {reader.count(url)} times {reader.placeholder!r} ({reader.token_id}) for an image of "
        f"{PICTURE[0]} x {PICTURE[1]} pixels"
    )
    faults = [
        f"the {line.part} takes none: {line.data.get('wrong_images', line.text)}"
        for line in (engine, trainer)
        if line.verdict == "refused" or "wrong_images" in line.data
    ]
    if why := _unrendered(folder, url, trust):
        faults.append(f"the chat template renders none: {why}")
    if faults:
        remedy = "set model.chat_template where the template is the reason; else show no images"
        return Line("images", "refused", "; ".join([text, *faults]), remedy, {"images": "refused"})
    text += "" if reader.plain else ", with marks around them or between rows, which vLLM does not take"
    text += f"; no videos: {reader.no_videos}" if reader.no_videos else f"; for videos {reader.video_token!r}"
    if not tried:
        text += "; engine and trainer try an image when a run loads the model"
        return Line("images", "ok", text, data={"images": "untried", "placeholder": reader.token_id})
    text += "; engine and trainer gave the logits of its own forward pass"
    return Line("images", "ok", text, data={"images": "ok", "placeholder": reader.token_id})


def _unrendered(folder: Path, url: str, trust: bool) -> str:
    """Returns why the chat template of a model renders no image; empty if it does."""
    from agentrl.core.template_marks import TemplateError
    from agentrl.inference.template import ChatTemplate

    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "a"}]
    try:
        ChatTemplate.from_folder(folder, trust=trust).first([{"role": "user", "content": content}], [])
    except (TemplateError, ImageRefused) as error:
        return str(error).partition("\n")[0]
    return ""


def _memory(folder: Path, trust: bool) -> Iterator[Line]:
    """Estimates memory; nothing if the number of parameters is not known."""
    try:
        shape = shape_of_folder(folder)
    except (OSError, ValueError):
        return
    if not (parameters := _parameters(folder, trust)):
        return
    text = (
        f"{parameters / 1e6:,.0f} million parameters: trainer {parameters * TRAINED_BYTES / GIB:.1f} GiB "
        f"without activations, server {parameters * 2 / GIB:.1f} GiB in bfloat16"
    )
    if shape.kv_width:
        text += f" and {4 * shape.layers * shape.kv_width / 1024:.0f} KiB of cache for each token"
    yield Line("memory", "ok", text, data={"parameters": parameters})


def _config(folder: Path) -> dict[str, Any]:
    return read_object(folder / "config.json")


def as_json(name: str, lines: list[Line]) -> str:
    """Returns one JSON object: ``train``, ``engine``, ``logprob_gap`` (empty where the trainer refuses), the lines."""
    found: dict[str, Any] = {"model": name, "train": "refused", "engine": "refused", "logprob_gap": {}}
    for line in lines:
        found |= line.data
    return json.dumps(found | {"lines": [{k: v for k, v in asdict(line).items() if k != "data"} for line in lines]})


def shown(lines: list[Line]) -> str:
    """Returns the table."""
    width = max(len(line.part) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.part:{width}}  {line.verdict:7}  {line.text}")
        if line.remedy:
            rows.append(f"{'':{width}}  {'':7}  -> {line.remedy}")
    return "\n".join(rows)
