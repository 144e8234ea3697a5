"""The request for a forward or backward pass: from protobuf to the trainer's call. What can be refused without the model is refused here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.algo.tinker import LOSSES, NamedLoss
from headrace.serve.training.messages.protobuf import FLOAT32, INT32, INT64
from headrace.trainer.shared.calls import Example, TrainingPass
from headrace.web.errors import Refused

MOST_EXAMPLES = 4096
"""Examples of one request. Its client sends 1024 at most."""
MOST_PLACES, MOST_BYTES = 1 << 24, 1 << 28
"""Numbers of one tensor that is sent as a sparse one, and bytes of all of a request when they are dense."""

_DTYPES: dict[int, np.dtype[Any]] = {FLOAT32: np.dtype("<f4"), INT64: np.dtype("<i8"), INT32: np.dtype("<i4")}


def pass_of(message: Any) -> TrainingPass:
    """Raises Refused with the name of what is not served, or the place of what does not fit."""
    loss, name = LOSSES.get(message.loss_fn), str(message.loss_fn)
    if loss is None:
        raise Refused(
            400,
            f"the loss {name} is not served; choose {', '.join(LOSSES)}, or forward_backward_custom",
            "unsupported_loss",
        )
    if not message.data:
        raise Refused(400, "data is empty; send one example at least")
    if len(message.data) > MOST_EXAMPLES:
        raise Refused(
            400, f"data has {len(message.data)} examples, and one request may have {MOST_EXAMPLES}; send several"
        )
    try:
        constants = loss.with_constants(_constants(message))
    except ValueError as error:
        raise Refused(400, f"{name}: {error}") from None
    examples, size = [], 0
    for number, datum in enumerate(message.data):
        examples.append(example := _example(f"data[{number}]", datum, name, loss))
        size += len(example.targets) + sum(map(len, example.inputs.values()))
        if size > MOST_BYTES:
            raise Refused(
                400,
                f"the tensors of data are larger than {MOST_BYTES} bytes when they are dense; send several requests",
            )
    return TrainingPass(
        model=message.model_id,
        examples=examples,
        loss=name,
        constants=constants,
        backward=not message.forward_only,
    )


def _constants(message: Any) -> dict[str, float]:
    given = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.text:
            raise ValueError(f"loss_fn_config sets {name} to a text, and all constants that are served are numbers")
        given[name] = value.number
    return given


def _example(place: str, datum: Any, name: str, loss: NamedLoss) -> Example:
    tokens = _tokens(place, datum)
    inputs = {key: _tensor(f"{place}.{key}", datum.loss_fn_inputs[key]) for key in datum.loss_fn_inputs}
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise Refused(400, f"{place} has no target_tokens")
    if missing := [key for key in loss.inputs if key not in inputs]:
        raise Refused(400, f"{place} has no {missing[0]}, which {name} needs")
    if strange := sorted(set(inputs) - set(loss.inputs)):
        raise Refused(400, f"{place} has {strange[0]}, which {name} does not read; remove it")
    if not np.issubdtype(targets.dtype, np.integer):
        raise Refused(400, f"{place}.target_tokens is not of integers")
    if targets.ndim > 2 or (targets.ndim == 2 and not loss.wide):
        raise Refused(400, f"{place}.target_tokens has {targets.ndim} dimensions; {name} takes {1 + loss.wide} at most")
    if targets.ndim == 2 and not targets.shape[1]:
        raise Refused(400, f"{place}.target_tokens has no targets at any position")
    if targets.shape[0] != len(tokens):
        raise Refused(
            400, f"{place} has {len(tokens)} tokens and {targets.shape[0]} target_tokens; they must be as many"
        )
    for key, one in inputs.items():
        if one.shape != targets.shape:
            raise Refused(400, f"{place}.{key} has shape {list(one.shape)}, and target_tokens {list(targets.shape)}")
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise Refused(400, f"{place}.sequence_ratio_mask marks no position")
    return Example(
        tokens=tokens.tobytes(),
        targets=_in_range(f"{place}.target_tokens", targets).tobytes(),
        width=targets.shape[1] if targets.ndim == 2 else 1,
        inputs={key: np.ascontiguousarray(one, np.float32).tobytes() for key, one in inputs.items()},
    )


def _tokens(place: str, datum: Any) -> NDArray[np.int32]:
    parts = []
    for chunk in datum.model_input:
        kind = next((kind for kind in ("image", "dmel") if chunk.HasField(kind)), "")
        if kind or not chunk.HasField("encoded_text"):
            raise Refused(400, f"{place}.model_input has a chunk of {kind or 'no kind'}; only tokens are served")
        if len(chunk.encoded_text.tokens) % 4:
            raise Refused(400, f"{place}.model_input has tokens that are not of 4 bytes each")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    if not len(tokens):
        raise Refused(400, f"{place}.model_input has no tokens")
    return tokens.astype(np.int32)


def _in_range(place: str, values: NDArray[Any]) -> NDArray[np.int32]:
    if values.size and (values.min() < 0 or values.max() >= 1 << 31):
        raise Refused(400, f"{place} has a number that is no token")
    return np.ascontiguousarray(values, np.int32)


def _tensor(place: str, message: Any) -> NDArray[Any]:
    """Dense, with zeros where a sparse one lists nothing."""
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise Refused(400, f"{place} has no dtype that is served; send float32 or int64")
    shape = tuple(message.shape)
    try:
        if message.HasField("sparse_csr"):
            return _dense(message.sparse_csr, dtype, shape)
        values = np.frombuffer(message.dense, dtype)
        return values.reshape(shape) if shape else values
    except (ValueError, IndexError) as error:
        raise Refused(400, f"{place} is no tensor of shape {list(shape)}: {error}") from None


def _dense(sparse: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MOST_PLACES:
        raise ValueError("a sparse tensor has two dimensions, and 2^24 places at most")
    values = np.frombuffer(sparse.values, dtype)
    rows, columns = np.frombuffer(sparse.crow_indices, "<i8"), np.frombuffer(sparse.col_indices, "<i8")
    ends = len(rows) == shape[0] + 1 and rows[0] == 0 and rows[-1] == len(values) == len(columns)
    if not ends or rows.min() < 0 or rows.max() > len(values) or (np.diff(rows) < 0).any():
        raise ValueError("its rows do not count its values")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise ValueError("it names a column that it does not have")
    places = np.repeat(np.arange(shape[0]), np.diff(rows)), columns
    if len(set(zip(*(one.tolist() for one in places), strict=True))) < len(values):
        raise ValueError("it has several values for one place")
    whole = np.zeros(shape, dtype)
    whole[places] = values
    return whole
