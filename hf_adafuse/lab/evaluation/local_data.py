"""Loads the questions of the tasks in `tasks/`: from files of one's own, from the Hub, or those of the demo.

A file has one JSON object per line, `{"question": ..., "answer": ...}`. The answer is a text, or a list of accepted
ones. The first lines are the worked examples of every prompt, and the other lines are asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ...cli.questions import answers_of

QuestionRow = dict[str, Any]  # {"question": str, "answers": list[str]}
KEYS = ("nq", "triviaqa", "squad", "gsm8k", "flores_en_de", "flores_de_en")
DEMO = "demo"  # the task whose questions come with the package
# By task, where its questions are on the Hub: the dataset, the subset, the split of examples, and the split to ask.
_HUB = {
    "nq": ("google-research-datasets/nq_open", None, "train", "validation"),
    "triviaqa": ("mandarjoshi/trivia_qa", "rc.nocontext", "train", "validation"),
    "squad": ("rajpurkar/squad", None, "train", "validation"),
    "gsm8k": ("openai/gsm8k", "main", "train", "test"),
}
_FLORES = "openlanguagedata/flores_plus"


def load_splits(key: str, default_shots: int, data: str | None = None, shots: int | None = None, **_: Any) -> Any:
    """
    The data of a task, as the harness asks for it (`custom_dataset`).

    Args:
        key (`str`): the task: one of `KEYS`, or `DEMO`, whose questions are never read from `data`.
        default_shots (`int`): the number of worked examples, where `shots` is not given.
        data (`str`, *optional*): the folder with the files. By default questions are loaded from the Hub.
        shots (`int`, *optional*): the number of worked examples in a prompt.

    Returns:
        `dict`: the datasets `examples` and `test`, with the columns `question` and `answers`. No row is in both.

    Raises:
        ValueError: there is no such file, or it does not have this form.
    """
    from datasets import Dataset

    count = default_shots if shots is None else int(shots)
    if key == DEMO:
        rows = list(_of_the_demo())
        examples, test = rows[:count], rows[count:]
    elif data is not None:
        path = find_file(data, key)
        rows = list(read_rows(path))
        if len(rows) <= count:
            raise ValueError(
                f"{str(path)!r} must have more lines than the {count} worked examples, but has {len(rows)}. Give more, "
                "or ask with fewer examples (--num-fewshot)."
            )
        examples, test = rows[:count], rows[count:]
    else:
        examples, test = _from_hub(key, count)
    return {"examples": Dataset.from_list(examples), "test": Dataset.from_list(test)}


def find_file(folder: str, key: str) -> Path:
    """
    The file of a task in a folder: the one whose name begins with the task's key.

    Raises:
        ValueError: there is no such file, or there are several.
    """
    found = find_files(folder, key)
    if len(found) != 1:
        others = f"the files {', '.join(path.name for path in found)}" if found else "no file"
        raise ValueError(
            f"`--data` must hold one file {key}*.jsonl for the task {key}, but {folder!r} has {others} of that name. "
            "Give a folder with one file per task."
        )
    return found[0]


def find_files(folder: str, key: str) -> list[Path]:
    """
    The files of a folder whose names begin with a task's key.

    Raises:
        ValueError: there is no such folder.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"`--data` must be a folder, but {folder!r} is none. Check the name.")
    return sorted(path for path in Path(folder).glob(f"{key}*.jsonl") if path.is_file())


def read_rows(path: Path) -> Iterator[QuestionRow]:
    """
    The questions of a file.

    Raises:
        ValueError: a line does not have the form that the module describes.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} must be in UTF-8, but is not ({error}). Save it so.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            row = {"question": record["question"], "answers": answers_of(record["answer"])}
        except (ValueError, TypeError, KeyError):
            row = {"question": None}
        if not isinstance(row["question"], str) or not row["answers"]:
            raise ValueError(
                f'Lines must be {{"question": ..., "answer": ...}}, but line {number} of {str(path)!r} is not. Mend it.'
            )
        yield row


def _of_the_demo() -> Iterator[QuestionRow]:
    from ...demo.data import PROMPT, held_out

    head, tail = PROMPT.split("{question}")
    for question in held_out():
        yield {"question": question.prompt.removeprefix(head).removesuffix(tail), "answers": [question.answer]}


def _from_hub(key: str, count: int) -> tuple[list[QuestionRow], list[QuestionRow]]:
    from datasets import load_dataset

    def load(name: str, subset: str | None, split: str) -> Iterable[Any]:
        try:
            return load_dataset(name, subset, split=split)  # type: ignore[no-any-return]
        except Exception as error:  # whatever the Hub's client raises about the network or the data
            raise ValueError(
                f"The data of the task {key} must be on the Hub ({name}) or in a folder, but does not load "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}). Pass --data FOLDER."
            ) from error

    if key not in _HUB:
        languages = ("eng_Latn", "deu_Latn")
        source, target = languages if key == "flores_en_de" else languages[::-1]
        halves = []
        for split in ("dev", "devtest"):
            pairs = zip(load(_FLORES, source, split), load(_FLORES, target, split), strict=True)
            halves.append([{"question": a["text"], "answers": [b["text"]]} for a, b in pairs])
        return halves[0][:count], halves[1]
    name, subset, train, test = _HUB[key]
    examples = [_row(key, record) for record in islice(load(name, subset, train), count)]
    return examples, [_row(key, record) for record in load(name, subset, test)]


def _row(key: str, record: dict[str, Any]) -> QuestionRow:
    answer = record["answer"] if "answer" in record else record["answers"]["text"]
    if key == "triviaqa":  # the main form of the answer comes first, as worked examples show it
        answer = [answer["value"], *(alias for alias in answer["aliases"] if alias != answer["value"])]
    question = f"{record['context']}\n{record['question']}" if key == "squad" else record["question"]
    return {"question": question, "answers": answers_of(answer)}
