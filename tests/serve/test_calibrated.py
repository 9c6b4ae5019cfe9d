"""What a server says of the confidence of a method with a calibration."""

from __future__ import annotations

import pytest
from servers_of_tests import MODEL, members, running, service_of
from support.cases import random_calibration

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble

QUESTION = [{"role": "user", "content": "Once upon a time"}]


def test_the_probability_of_an_answer_is_that_of_the_whole_also_before_a_stop_text():
    options = {"calibration": random_calibration(3, 2)}
    config = AdaFuseConfig(method="select", method_options=options)
    ensemble = AdaFuseEnsemble(members(), config)
    (whole,) = ensemble.rounds([QUESTION], chat=True, max_new_tokens=24)
    stop = whole.text[6:9]
    (stopped,) = ensemble.rounds([QUESTION], chat=True, max_new_tokens=24, stop_strings=[stop])
    assert stopped.is_calibrated and stop in stopped.text
    with running(service_of(config=config)) as (_, client):
        for expected, asked in ((whole, {}), (stopped, {"stop": [stop]})):
            answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=24, **asked)
            assert answer.choices[0].message.adafuse["confidence"] == pytest.approx(expected.confidence)
