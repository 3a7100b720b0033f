"""Prompt files of every kind, the held-out split, and the order of training."""

import json

import pytest

from egrpo.prompts import PromptError, checked_prompts, make_prompt_set, read_prompt_file

PROMPTS = ["a red cube", 'a "quoted", comma cat', "ein grüner Würfel", "一只猫"]

FILES = {
    "lines.txt": "\n".join(PROMPTS),
    "windows.txt": "\r\n".join(PROMPTS) + "\r\n",
    "strings.jsonl": "\n".join(json.dumps(p) for p in PROMPTS),
    "objects.jsonl": "\n\n".join(json.dumps({"id": 1, "prompt": p}, ensure_ascii=False) for p in PROMPTS) + "\n",
    "list.json": json.dumps(PROMPTS),
    "captions.json": json.dumps([{"caption": p, "file": "x.png"} for p in PROMPTS]),
    "table.csv": "id,text\n" + "\n".join('{},"{}"'.format(n, p.replace('"', '""')) for n, p in enumerate(PROMPTS)),
}


def write(folder, name, text, encoding="utf-8"):
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind_with_and_without_bom(tmp_path, name, encoding):
    assert [p for p in read_prompt_file(write(tmp_path, name, FILES[name], encoding)) if p] == PROMPTS


def test_suffix_in_capitals(tmp_path):
    assert read_prompt_file(write(tmp_path, "A.TXT", "one\ntwo")) == ["one", "two"]


def test_jsonl_lines_end_at_newlines_only(tmp_path):
    """U+2028 may stand unescaped inside a JSON string."""
    assert read_prompt_file(write(tmp_path, "t.jsonl", '"a\u2028b"\n"c"')) == ["a\u2028b", "c"]


def test_csv_field_may_span_lines(tmp_path):
    path = write(tmp_path, "t.csv", 'prompt,id\n"a cat\non a mat",1\nb,2\n')
    assert read_prompt_file(path) == ["a cat\non a mat", "b"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.jsonl", '"fine"\n{"prompt": "cut\n"fine"', r"bad\.jsonl line 2"),
        ("missing.jsonl", '{"prompt": "a"}\n{"title": "b"}', r"missing\.jsonl line 2 has no prompt .* only title"),
        ("number.json", '["a", 3]', r"number\.json item 1 is int"),
        ("object.json", '{"prompt": "a"}', "must hold a JSON list"),
        ("bad.json", "[", r"bad\.json is not valid JSON"),
        ("columns.csv", "id,title\n1,a", r"columns\.csv line 2 has no prompt"),
        ("prompts.yaml", "- a", r"end in \.txt, \.jsonl, \.json, \.csv"),
    ],
)
def test_broken_files_name_the_place(tmp_path, name, text, message):
    with pytest.raises(PromptError, match=message):
        read_prompt_file(write(tmp_path, name, text))


def test_missing_file_and_other_encodings_are_named(tmp_path):
    with pytest.raises(PromptError, match=r"nowhere\.txt does not exist"):
        read_prompt_file(tmp_path / "nowhere.txt")
    with pytest.raises(PromptError, match=r"latin\.txt is not UTF-8"):
        read_prompt_file(write(tmp_path, "latin.txt", "grün", "latin-1"))


def prompts(count):
    return [f"prompt {n}" for n in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "held_out"), [(10, 3), (5, 4), (100, 1)])
def test_held_out_prompts_are_never_trained_on(count, held_out, shuffle):
    made = make_prompt_set([*prompts(count), "prompt 0", " prompt 1 "], shuffle=shuffle, held_out=held_out, seed=3)
    assert len(made.held_out) == held_out and len(made.train) == count - held_out
    assert not set(made.train) & set(made.held_out)


def test_too_few_prompts_are_evaluated_on_themselves():
    made = make_prompt_set(prompts(3), held_out=4)
    assert made.train == made.held_out == tuple(prompts(3))


def test_shuffle_and_limit_are_decided_by_the_seed():
    first, again, other = (make_prompt_set(prompts(50), shuffle=True, limit=10, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first.train) + len(first.held_out) == 10
    assert first.digest == again.digest != other.digest


@pytest.mark.parametrize("empty", [[], ["", "   ", "\n"]])
def test_no_prompts_are_refused(empty):
    with pytest.raises(PromptError, match="no prompts in text"):
        make_prompt_set(empty)


def test_an_empty_prompt_in_a_list_is_named():
    with pytest.raises(PromptError, match="no training prompts"):
        checked_prompts([], "training")
    with pytest.raises(PromptError, match="evaluation prompt 1 is empty"):
        checked_prompts(["a", " "], "evaluation")


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_batches_walk_through_every_prompt_in_each_epoch(size):
    made = make_prompt_set(prompts(7), held_out=0)
    walked = [prompt for iteration in range(21) for prompt in made.batch(iteration, size, seed=5)]
    epochs = [walked[start : start + 7] for start in range(0, 7 * (len(walked) // 7), 7)]
    assert all(sorted(epoch) == sorted(made.train) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


def test_a_batch_depends_on_its_arguments_alone():
    made = make_prompt_set(prompts(7), held_out=0)
    later = made.batch(9, 2, seed=5)
    assert [made.batch(i, 2, seed=5) for i in range(10)][9] == later
    assert any(made.batch(i, 2, seed=5) != made.batch(i, 2, seed=6) for i in range(4))
