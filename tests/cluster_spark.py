"""A proof on a real local Spark with two worker processes: `mapInPandas` over 200 prompts. Every answer is there once,
and is the one of `hf-adafuse run`.

It is no test of pytest's: Spark needs Java. By hand, from the repository:

    python3 -m venv .venv-spark && .venv-spark/bin/pip install -q -c tests/constraints.txt -e . pyspark pandas pyarrow
    .venv-spark/bin/python tests/cluster_spark.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster_ray import FLAGS, NUMBER, agreements, say, write_input
from pyspark.sql import SparkSession
from pyspark.sql.functions import spark_partition_id

from hf_adafuse import AdaFusePredictor
from hf_adafuse.demo.data import PROMPT

SCHEMA = "id string, question string, text string, words long, finish_reason string, error string"


def main() -> int:
    """0 where it holds."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYSPARK_PYTHON": sys.executable}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder)
        command = [sys.executable, "-m", "hf_adafuse", "run", "questions.jsonl", "--output", "run.jsonl", *FLAGS]
        subprocess.run(command, cwd=folder, check=True)
        session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
        try:
            frame = session.read.json(str(folder / "questions.jsonl"), schema="id string, question string")
            frame = frame.repartition(4, "id")
            members = [str(folder / place) for place in "AB"]
            predictor = AdaFusePredictor(members, "robust", template=PROMPT, lazy=True)
            answers = frame.mapInPandas(predictor.map_in_pandas, SCHEMA).withColumn("part", spark_partition_id())
            rows = answers.collect()
        finally:
            session.stop()
        return 0 if holds(folder, rows) else 1


def holds(folder: Path, rows: list) -> bool:
    """Whether the answers are those of the command, each once."""
    answers = {row["id"]: row for row in rows}
    parts = len({row["part"] for row in rows})
    say(f"{len(rows)} answers to {len(answers)} questions from {parts} partitions")
    same = agreements(folder, answers)
    return all(same) and len(rows) == len(answers) == len(same) == NUMBER and parts > 1


if __name__ == "__main__":
    sys.exit(main())
