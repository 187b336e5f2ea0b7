"""Converts a GGUF file to a Hugging Face folder with plain float32 weights, once.

Guarantees: the folder is complete or absent; if two processes convert concurrently, one waits and both use the same
folder; a different GGUF gets a different folder.
"""

import contextlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from agentrl.config.errors import DataError
from agentrl.core.extras import install_hint
from agentrl.host.cache_folder import cache_folder

LAYOUT = 1  # increase it when the written format changes, so that old folders are not used


def converted(file: Path, name: str, say: Callable[[str], None]) -> Path:
    """Returns the Hugging Face folder of a GGUF; converts the file if needed.

    Args:
        file: The GGUF file.
        name: The model's name, part of the folder's name.
        say: Called with a sentence before the conversion.

    Raises:
        DataError: The file cannot be converted, or the folder cannot be written.
    """
    stat = file.stat()
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{file.stem}")
    target = cache_folder() / "models" / f"{slug}-{stat.st_size:x}-v{LAYOUT}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot create {target.parent} for the converted model: {error}; set AGENTRL_CACHE") from error
    from filelock import FileLock

    with FileLock(target.parent / f".{target.name}.lock"):
        if target.is_dir():  # another process has made it meanwhile
            return target
        say(f"converting {file.name} into a Hugging Face folder, once; this takes half a minute")
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            _convert(file, work)
            work.chmod(0o755)
            work.rename(target)
        except OSError as error:
            raise DataError(f"cannot convert {file} into {target}: {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def _convert(file: Path, target: Path) -> None:
    try:
        import gguf  # noqa: F401 - transformers imports it late, with a message of its own
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise DataError(f"converting {file.name} needs {error.name}: {install_hint('train')}") from error

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses progress bars; one of them is tqdm's, which needs a redirected standard error."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
