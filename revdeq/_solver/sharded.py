"""Parameters of f that FSDP2 shards: `fully_shard(f)`, or a module inside of f.

FSDP gathers them in a hook before f and, in the backward pass, reduces what has been accumulated in their `.grad`
in a hook after f. The solver evaluates f many times, and has the gradient of all evaluations when none of these
hooks is left to run. So it is handed to FSDP then: accumulated where FSDP looks for it, and reduced at once.

Where the module that is sharded contains the solve, FSDP's hooks run around it, and there is nothing to do.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Shards:
    """The parameters that FSDP gathers within f, as f sees them."""

    def __init__(self) -> None:
        """To be made before f is evaluated: what FSDP has gathered by then, it has gathered around the solve."""
        self._states = [state for state in _states() if state._training_state.name == "IDLE"]
        self._uses = [(group, len(group._post_forward_indices)) for state in self._states for group in _groups(state)]

    def among(self, tensors: Sequence[Tensor]) -> dict[int, tuple[Any, Any]]:
        """By the indices of these tensors: FSDP's state and group of parameters."""
        if not self._states:
            return {}
        index = {id(x): i for i, x in enumerate(tensors)}
        return {
            index[id(parameter._unsharded_param)]: (state, group)
            for state in self._states
            for group in _groups(state)
            for parameter in group.fsdp_params
            if id(getattr(parameter, "_unsharded_param", None)) in index
        }

    def without(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """A module's tensors but for those that FSDP exchanges itself: shards for whole ones, and back."""
        if not self._states:
            return named
        parameters = [p for state in self._states for group in _groups(state) for p in group.fsdp_params]
        exchanged = {id(getattr(p, name, None)) for p in parameters for name in ("sharded_param", "_unsharded_param")}
        return {name: x for name, x in named.items() if id(x) not in exchanged}

    def refuse_tolerance(self) -> None:
        """To be called after the first evaluation, when it is known what FSDP has gathered for it."""
        for group, uses in self._uses:
            if len(group._post_forward_indices) > uses and group.mesh_info.mesh.size() > 1:
                raise ValueError(
                    "tol with an f that fully_shard has sharded over several processes would not end: they would stop "
                    "after different numbers of steps, and each step needs all of them. Use tol=None, or shard the "
                    "module around the solve (fully_shard(deq))"
                )

    def deliver(self, tensors: Sequence[Tensor], grads: list[Tensor | None]) -> list[Tensor | None]:
        """Hands to FSDP the gradients that it waits for, and returns the others."""
        groups: dict[int, tuple[Any, Any]] = {}
        for i, (state, group) in self.among(tensors).items():
            x, grad = tensors[i], grads[i]
            if grad is None or not _is_asked_for(x):
                continue
            x.grad = grad if x.grad is None else x.grad + grad
            grads[i] = None
            groups[id(group)] = state, group
        for state, group in groups.values():
            state._register_root_post_backward_final_callback()
            group.post_backward()
        return grads


def _is_asked_for(leaf: Tensor) -> bool:
    """Whether this backward pass accumulates gradients in this leaf: `torch.autograd.grad` may not."""
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)


def _states() -> list[Any]:
    """FSDP's states of all modules that it shards in this process."""
    if "torch.distributed.fsdp._fully_shard" not in sys.modules:
        return []
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    states = {id(state): state for ref in _module_state_mapping.values() if (state := ref()) is not None}
    return [state for state in states.values() if isinstance(state, FSDPState)]


def _groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
