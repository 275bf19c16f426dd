"""What the following steps of a learner depend on: tensors by name, and everything else as plain values.

    policy.<name>                      master weights, float32, and buffers
    policy_optimizer.<name>.exp_avg    moments, float32; likewise exp_avg_sq
    critic.<name>, critic_optimizer.…  the same of the critic

Everything goes by name. Weights that are never trained, such as the base below adapters, are not saved: they come from
the model's directory again, and their digest says whether they are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from rollwire.learner.gradients import LossScale
from rollwire.learner.optimizer import PolicyOptimizer
from rollwire.learner.publish import whole
from rollwire.rpc.digests import tensor_digest, weights_digest
from rollwire.serving.model_tensors import named_weights, to_host

Spec: TypeAlias = list[Any]
"""Element type and shape of a tensor, as JSON has them."""

_TYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class TrainedModel:
    """A model with its optimizer.

    Attributes:
        name: `policy` or `critic`; what names of tensors begin with.
        model: The model.
        optimizer: Its optimizer.
        loss_scale: Its loss scale.
    """

    name: str
    model: Any
    optimizer: PolicyOptimizer
    loss_scale: LossScale

    def weights(self) -> dict[str, Tensor]:
        """Returns trained parameters, and buffers, by name; they share memory with the model."""
        frozen = {name for name, _ in self._frozen()}
        return {
            f"{self.name}.{name}": tensor.detach() for name, tensor in named_weights(self.model) if name not in frozen
        }

    @cached_property
    def frozen_digest(self) -> str:
        """Digest of the parameters that are never trained, in hexadecimal digits; empty if all are.

        All ranks ask for it together the first time.
        """
        tensors = [
            (name, tensor_digest(to_host(whole(parameter, parameter.dtype), parameter.dtype).data))
            for name, parameter in self._frozen()
        ]
        return weights_digest(tensors).hex() if tensors else ""

    def _frozen(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in self.model.named_parameters() if not tensor.requires_grad]

    def moments(self) -> dict[str, Tensor]:
        """Returns the optimizer's tensors that are as large as their parameter, by name."""
        return {
            f"{self.name}_optimizer.{name}.{key}": value
            for name, state in self._states().items()
            for key, value in state.items()
            if not _is_scalar(value)
        }

    def values(self) -> dict[str, Any]:
        """Returns what is no tensor, as JSON has it."""
        return {
            "architecture": type(self.model).__name__,
            "frozen_digest": self.frozen_digest,
            "attempted": self.optimizer.attempted,
            "applied": self.optimizer.applied,
            "loss_scale": {"value": self.loss_scale.value, "finite_steps": self.loss_scale.finite_steps},
            "scalars": {
                name: {key: float(value) for key, value in state.items() if _is_scalar(value)}
                for name, state in self._states().items()
            },
        }

    def restore_values(self, values: Mapping[str, Any], specs: Mapping[str, Spec]) -> None:
        """Makes the optimizer what it was, except that its moments are zero: those are to be loaded into `moments()`.

        Args:
            values: What `values` returned then.
            specs: All tensors of the checkpoint.
        """
        self.optimizer.attempted, self.optimizer.applied = values["attempted"], values["applied"]
        self.loss_scale.value = values["loss_scale"]["value"]
        self.loss_scale.finite_steps = values["loss_scale"]["finite_steps"]
        self.optimizer.discard_gradients()
        states: Any = self.optimizer.adamw.state
        states.clear()
        on_device = {
            id(parameter): group["fused"] or group["capturable"]
            for group in self.optimizer.adamw.param_groups
            for parameter in group["params"]
        }
        moments: dict[str, dict[str, str]] = defaultdict(dict)
        for full, (dtype, _) in specs.items():
            kind, _, rest = full.partition(".")
            if kind == f"{self.name}_optimizer":
                name, _, key = rest.rpartition(".")
                moments[name][key] = dtype
        for name, parameter in self.model.named_parameters():
            scalars = values["scalars"].get(name)
            if scalars is None:
                continue
            # AdamW's fused kernels want the step beside the parameter, the others on the host.
            place = parameter.device if on_device[id(parameter)] else torch.device("cpu")
            states[parameter] = {key: torch.tensor(value, device=place) for key, value in scalars.items()}
            for key, dtype in moments[name].items():
                states[parameter][key] = torch.zeros_like(parameter, dtype=_TYPES[dtype])

    def _states(self) -> dict[str, dict[str, Any]]:
        states: Any = self.optimizer.adamw.state
        return {name: states[parameter] for name, parameter in self.model.named_parameters() if states.get(parameter)}


def describe(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Returns element type and whole shape of each tensor."""
    return {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in sorted(tensors.items())
    }


def difference(models: Sequence[TrainedModel], state: Mapping[str, Any]) -> str:
    """Returns why a checkpoint is not one of these models, or an empty text; all ranks ask together."""
    saved: Mapping[str, Spec] = state["tensors"]
    if sorted(state["models"]) != sorted(model.name for model in models):
        return f"it has {_list(state['models'])}, this learner has {_list(model.name for model in models)}"
    for model in models:
        architecture = state["models"][model.name]["architecture"]
        if architecture != type(model.model).__name__:
            return f"its {model.name} is a {architecture}, this learner's a {type(model.model).__name__}"
        own = describe(model.weights())
        theirs = {name: spec for name, spec in saved.items() if name.startswith(f"{model.name}.")}
        for name in sorted(own.keys() | theirs.keys()):
            if own.get(name) != theirs.get(name):
                return f"its tensor {name} is {_text(theirs.get(name))}, this learner's {_text(own.get(name))}"
        if model.frozen_digest != state["models"][model.name]["frozen_digest"]:
            return f"the weights of its {model.name} that are not trained are others; is model.path the same?"
    return ""


def generators(device: torch.device) -> dict[str, str | None]:
    """Returns the states of this rank's random generators as hexadecimal digits."""
    own = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return {"cpu": _hex(torch.get_rng_state()), "device": None if own is None else _hex(own)}


def restore_generators(states: Mapping[str, str | None], device: torch.device) -> None:
    """Makes them what they were; a generator of another kind of device is left as it is."""
    if states["cpu"] is not None:
        torch.set_rng_state(_bytes(states["cpu"]))
    if states["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_bytes(states["device"]))


def _is_scalar(value: object) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _hex(state: Tensor) -> str:
    return state.cpu().numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _list(names: Any) -> str:
    return " and ".join(sorted(names))


def _text(spec: Spec | None) -> str:
    return f"{spec[0]}{spec[1]}" if spec else "not there"
