"""`hf-adafuse demo`: the embedded pair at work. Only names the command; the demo itself is in `hf_adafuse.demo`."""

from __future__ import annotations

from ..demo.cli import HELP, add_arguments, run

__all__ = ["HELP", "add_arguments", "run"]
