"""Functions shared by the evaluation scripts."""

import csv

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache
from typer.testing import CliRunner

import common
from hf_offload.tools import assets


@pytest.fixture
def tiny():
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def test_numbers_reads_k_as_1024():
    assert common.numbers("128, 2k,8k") == [128, 2048, 8192]
    with pytest.raises(typer.BadParameter, match="'1,x' is not a list"):
        common.numbers("1,x")


def test_decimals_reads_positive_numbers():
    assert common.decimals("0.25, 1") == [0.25, 1.0]
    for wrong in ("0.1,x", "", "-1", "0", "inf", "nan"):
        with pytest.raises(typer.BadParameter, match="is not a list of positive numbers"):
            common.decimals(wrong)


def test_tables_in_markdown():
    rows = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert common.markdown(rows) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"


def test_kinds_of_refuses_unknown_kinds():
    assert common.kinds_of("code, prose") == ["code", "prose"]
    with pytest.raises(typer.BadParameter, match="unknown kinds poetry"):
        common.kinds_of("code,poetry")


def test_a_kind_that_is_named_twice_is_one():
    assert common.kinds_of("code,prose,code") == ["code", "prose"]


def test_a_row_has_a_policy_and_options():
    row = common.row_of("scout:budget=512,tier=split,recall=8")
    assert (row.name, row.policy) == ("scout:budget=512,tier=split,recall=8", "scout")
    assert row.options == {"budget": 512, "tier": "split", "recall": 8}
    assert common.row_of("full").options == {}
    assert common.row_of("hgca:gpu_ratio=0.1,reevaluate=False").options == {"gpu_ratio": 0.1, "reevaluate": False}
    assert common.row_of("full", "one").options == {"tier": "one"}
    assert common.row_of("full:tier=split", "one").options == {"tier": "split"}


@pytest.mark.parametrize(
    ("short", "policy", "options"),
    [
        ("scout-512", "scout", {"budget": 512}),
        ("scout-512-int8", "scout", {"budget": 512, "host_dtype": "int8"}),
        ("full-int8", "full", {"host_dtype": "int8"}),
        ("hgca-0.1-once", "hgca", {"gpu_ratio": 0.1, "beta": 1.0, "reevaluate": False}),
        ("hgca-1024", "hgca", {"window": 1024, "beta": 1.0}),
        ("fixed-0.05", "fixed_hybrid", {"budget": 0.05}),
        ("dynamic", "dynamic", {}),
    ],
)
def test_a_short_name_is_a_policy_with_options(short, policy, options):
    row = common.row_of(short, stock=common.STOCK)
    assert (row.name, row.policy, row.options) == (short, policy, options)


def test_rows_come_in_lists_and_one_by_one():
    rows = common.rows_of(["full, scout:budget=512,tier=split,window-512", "quest:budget=512"])
    assert [row.name for row in rows] == ["full", "scout:budget=512,tier=split", "window-512", "quest:budget=512"]
    own = {"mine": common.Row("mine", "full"), "both": ["mine", "window-512"]}
    assert [row.name for row in common.rows_of(["scout-512,both"], known=own)] == ["scout-512", "mine", "window-512"]


def test_the_folder_of_a_file_is_not_in_the_name(tmp_path):
    name = "fluxion:predictor=some.safetensors,tau=0.1"
    assert common.row_of(f"fluxion:predictor={tmp_path}/some.safetensors,tau=0.1").name == name
    row = common.row_of("fluxion-0.1", predictor=tmp_path / "some.safetensors")
    assert row.options == {"predictor": f"{tmp_path}/some.safetensors", "tau": 0.1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonesuch", "policy='nonesuch' is unknown"),
        ("scout:window=512", "window: not a knob of policy 'scout'"),
        ("window:budget=many", "budget='many'"),
        ("dynamic:budget=512", "policy='dynamic' is unknown"),
        ("fluxion", "needs a predictor"),
        ("scout:512", "not a policy with options"),
    ],
)
def test_wrong_rows_are_refused(text, message):
    with pytest.raises(typer.BadParameter, match=message):
        common.row_of(text)


def test_a_row_is_there_once():
    with pytest.raises(typer.BadParameter, match="twice"):
        common.rows_of(["full", "full"])


def test_rows_know_what_is_in_the_files_of_their_knobs(tmp_path):
    found = []
    for number, text in enumerate(("one", "two", "one")):
        file = tmp_path / str(number) / "p.safetensors"
        file.parent.mkdir()
        file.write_text(text)
        found.append(common.row_of(f"fluxion:predictor={file},tau=0.1"))
    assert len({row.name for row in found}) == 1
    first, second, third = (row.files for row in found)
    assert first == third != second
    assert first.keys() == {"predictor"}
    assert common.row_of("full:host=fetch").files == {}


def test_rows_make_stock_caches_under_sdpa(tiny):
    dynamic = common.FULL.make_cache(tiny)
    assert type(dynamic) is DynamicCache
    assert tiny.config._attn_implementation == "sdpa"
    static = common.Row("static", "static").make_cache(tiny, 16)
    assert type(static) is StaticCache


@torch.inference_mode()
def test_prefill_in_chunks_is_the_same_as_at_once(tiny):
    ids = torch.arange(10)[None]
    whole, parts = common.FULL.make_cache(tiny), common.FULL.make_cache(tiny)
    torch.testing.assert_close(common.prefill(tiny, whole, ids), common.prefill(tiny, parts, ids, chunk=4))
    assert parts.get_seq_length() == 10


def test_bytes_of_a_token_are_those_that_a_cache_takes(tiny):
    cache = common.FULL.make_cache(tiny)
    common.prefill(tiny, cache, torch.arange(10)[None])
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 10 * common.token_bytes(tiny, 2)


def test_text_of_takes_a_book_for_the_prose(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("Call me Ishmael.", encoding="utf-8")
    assert common.text_of("prose", book) == "Call me Ishmael."
    assert common.text_of("code", book) == assets.demo_text("code")


def test_window_refuses_a_text_that_ends_before_it():
    def letters(text, add_special_tokens):
        return {"input_ids": [ord(c) for c in text]}

    assert common.window("abcdef", letters, 1, 3).tolist() == [[98, 99, 100]]
    with pytest.raises(typer.BadParameter, match="the text has 6 tokens; a window at 4 needs 3 more"):
        common.window("abcdef", letters, 4, 3)


def test_percentiles():
    assert common.percentiles(range(11)) == {"p20": 2.0, "p50": 5.0, "p80": 8.0}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("/home/me/novel.txt", "novel.txt"),
        ("../data/novel.txt", "novel.txt"),
        (
            "--row=fluxion:predictor=/some/folder/predictor.safetensors,tau=0.1",
            "--row=fluxion:predictor=predictor.safetensors,tau=0.1",
        ),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
    ],
)
def test_commands_tell_names_of_files_and_not_where_they_lie(given, told, monkeypatch):
    monkeypatch.setattr("sys.argv", ["eval/needle.py", given])
    assert common.environment()["command"] == f"python eval/needle.py {told}"


def test_csv_carries_what_the_result_depends_on(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["eval/needle.py", "--count", "3"])
    path = tmp_path / "new" / "results.csv"
    common.write_csv(path, [{"row": "a", "ms": 1.23456789}, {"row": "b", "ms": 2, "note": "late"}])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["ms"] == "1.23457"
    assert (first["note"], second["note"]) == ("", "late")
    assert first["command"] == "python eval/needle.py --count 3"
    assert first["threads"] == str(torch.get_num_threads())
    assert {"commit", "cpu", "gpu", "omp_wait_policy", "torch", "transformers", "numba", "triton", "python"} <= set(
        first
    )


def test_a_dataclass_among_the_parameters_stands_for_its_options(tmp_path):
    seen = []

    def main(count: int = 2, *, setting: common.TextSetting = common.EXACT_TEXT) -> None:
        """Count."""
        seen.append((count, setting))

    app, book = common.command(main), tmp_path / "book.txt"
    book.write_text("Call me Ishmael.")
    result = CliRunner().invoke(app, ["--count", "3", "--prose", str(book), "--model", "m"])
    assert result.exit_code == 0, result.output
    out = common.RESULTS / "test_common.csv"
    assert seen == [(3, common.TextSetting("m", "float32", 0, out, book))]
    assert "Count." in CliRunner().invoke(app, ["--help"]).output
    result = CliRunner().invoke(app, ["--dtype", "int3"])
    assert (result.exit_code, "int3" in result.output) == (2, True)


def test_rows_take_turns_forth_and_back():
    assert list(common.in_turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
