"""The commands of the lab: `hf-adafuse bench`, `compare`, `eval`, `fit`, `headroom` and `paper`."""
