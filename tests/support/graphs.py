"""What CUDA graphs demand of a compiled model, on CPU."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # torch's, of its own functions
    from torch._inductor.cudagraph_trees import MarkStepBox


class Graphs:
    """
    A backend of torch.compile that is as strict as CUDA graphs are: a graph is recorded for each shape, and for each
    address of an input that is said to stay where it is; only such ones may be written; and a run in a new step, of
    which each forward pass must be one, writes over what was given before.

    Attributes:
        num_compiled, num_runs, num_steps (`int`): what has been compiled, run, and in how many steps.
        recorded (`set`): of all that has been recorded, what was compiled, shapes, and addresses.
        given (`list`): outputs of this step.
    """

    def __init__(self):
        self.num_compiled = self.num_runs = self.num_steps = self.mark = 0
        self.recorded, self.given = set(), []

    def __call__(self, module, _):
        self.num_compiled += 1
        number = self.num_compiled

        def run(*inputs):
            self.num_runs += 1
            if self.mark != MarkStepBox.mark_step_counter:
                self._begin_step()
            tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
            static = [value for value in tensors if isinstance(value, torch.nn.Parameter) or is_static(value)]
            versions = [tensor._version for tensor in tensors]
            outputs = module(*inputs)
            written = [tensor for tensor, version in zip(tensors, versions) if tensor._version != version]
            assert all(map(is_static, written))
            shapes = tuple(tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in inputs)
            self.recorded.add((number, shapes, tuple(tensor.data_ptr() for tensor in static)))
            known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
            floats = [one for one in outputs if isinstance(one, torch.Tensor) and one.is_floating_point()]
            self.given += [one for one in floats if one.untyped_storage().data_ptr() not in known]
            return outputs

        return run

    def _begin_step(self):
        self.mark = MarkStepBox.mark_step_counter
        self.num_steps += 1
        while self.given:
            self.given.pop().fill_(torch.nan)


def is_static(tensor):
    return hasattr(tensor, "_dynamo_static_input_type")
