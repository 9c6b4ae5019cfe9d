"""The harness without its survey of the machine, which takes seconds."""

import pytest


@pytest.fixture(autouse=True)
def no_survey(monkeypatch):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
