"""The project's own files, for tests of what they say."""

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[2]


def setup_cfg():
    config = configparser.RawConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config
