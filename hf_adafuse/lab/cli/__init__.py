"""The commands of the lab: `hf-adafuse bench`, `compare`, `confidence`, `eval`, `fit`, `headroom` and `paper`."""
