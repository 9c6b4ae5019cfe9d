"""The settings of an exported repository. `hf-adafuse export` writes this file anew for each repository. In the package
they are empty.
"""

from __future__ import annotations

from typing import Any

# Fields of `AdaFuseConfig`, used where neither the call nor the model's generation config has any.
ADAFUSE_CONFIG: dict[str, Any] = {}

# Hub names, or folders of the repository as "./folder".
ASSISTANT_MODELS: list[str] = []

# What the code here runs with.
REQUIREMENTS: list[str] = ["torch>=2.6", "transformers>=5.17,<5.25"]
