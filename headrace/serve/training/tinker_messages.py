"""The messages of the Tinker API: JSON bodies, protobuf, and the trainer's calls that they become."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from msgspec import Meta
from numpy.typing import NDArray

from headrace.algo.tinker import LOSSES, NamedLoss
from headrace.trainer.shared.calls import Example, TrainingPass
from headrace.web.bodies import MOST_STOPS, Body, Count, Few, Seed, Token, TopK
from headrace.web.errors import Refused

# --- The model and the number of a request whose body is refused
# Read leniently, because a number that nobody takes holds up all behind it.


PROTOBUF_MODEL, PROTOBUF_NUMBER = 0x0A, 0x10
"""The tags of the first two fields of `ForwardBackwardRequest`, in wire format."""


class NumberedRequest(NamedTuple):
    model: str
    number: int
    trains: bool = False
    """Whether it would have been a part of the gradient, as far as one knows."""


def of_json(body: bytes) -> NumberedRequest | None:
    """Takes what Python's `json` writes, NaN too; other fields may be anything."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    model, number = (found.get("model_id"), found.get("seq_id")) if isinstance(found, dict) else (None, None)
    return NumberedRequest(model, number) if isinstance(model, str) and type(number) is int else None


def of_protobuf(body: bytes) -> NumberedRequest | None:
    """Takes the begin of a message too: a writer puts the fields in the order of their numbers, and these two are the first."""
    try:
        end = 2 + body[1]
        if body[0] != PROTOBUF_MODEL or body[1] >= 0x80 or body[end] != PROTOBUF_NUMBER:
            return None
        number, shift, place = 0, 0, end + 1
        while True:  # seven bits a byte, the lowest first
            number |= (body[place] & 0x7F) << shift
            if body[place] < 0x80:
                return NumberedRequest(body[2:end].decode(), number, trains=True)
            shift, place = shift + 7, place + 1
    except (IndexError, UnicodeDecodeError):
        return None


# --- JSON bodies of the Tinker API as msgspec structs
# An unknown field, a wrong type and a value out of range are refused by name.


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""The name of a checkpoint, which becomes that of a directory."""
LARGEST_NUMBER = 1 << 62
"""The first number that no request may have."""
SequenceNumber = Annotated[int, Meta(ge=0, lt=LARGEST_NUMBER)]
Rate = Annotated[float, Meta(ge=0, le=1e6)]
Decay = Annotated[float, Meta(ge=0, lt=1)]
Metadata = dict[str, Any] | None
Lifetime = Annotated[int, Meta(ge=3600, le=10 * 366 * 86400)]


class ClientConfig(Body, kw_only=True):
    sdk_version: str


class CreateSession(Body, kw_only=True):
    tags: list[str] = []
    user_metadata: Metadata = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class Heartbeat(Body, kw_only=True):
    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class Finish(Body, kw_only=True):
    reason: dict[str, Any] = {}
    detail: str | None = None


class LoraBody(Body, kw_only=True):
    rank: Annotated[int, Meta(ge=1)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: str = "adamw"
    version: int | None = None


class CreateModel(Body, kw_only=True):
    session_id: str
    model_seq_id: SequenceNumber
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraBody | None = None
    optimizer_config: Optimizer = Optimizer()
    type: Literal["create_model"] = "create_model"


class ModelId(Body, kw_only=True):
    model_id: str
    type: Literal["get_info"] = "get_info"


class Adam(Body, kw_only=True):
    """The API's defaults are those of `AdamStep`."""

    learning_rate: Rate = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Rate = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: float = 0.0


class OptimStep(Body, kw_only=True):
    model_id: str
    seq_id: SequenceNumber
    adam_params: Adam | None = None
    optimizer_params: dict[str, Any] | None = None
    type: Literal["optim_step"] = "optim_step"


class SaveWeights(Body, kw_only=True):
    model_id: str
    seq_id: SequenceNumber
    path: Name
    ttl_seconds: Lifetime | None = None
    overwrite: bool = False
    user_metadata: Metadata = None
    type: Literal["save_weights"] = "save_weights"


class SaveForSampler(Body, kw_only=True):
    model_id: str
    seq_id: SequenceNumber
    path: Name | None = None
    sampling_session_seq_id: SequenceNumber | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Lifetime | None = None
    user_metadata: Metadata = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


class LoadWeights(Body, kw_only=True):
    """Either into a model (`model_id`, `seq_id`), or as the first request of a new one (`session_id`, `model_seq_id`)."""

    model_id: str | None = None
    seq_id: SequenceNumber | None = None
    session_id: str | None = None
    model_seq_id: SequenceNumber | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None
    type: Literal["load_weights"] = "load_weights"


class CreateSampler(Body, kw_only=True):
    session_id: str
    sampling_session_seq_id: SequenceNumber
    base_model: str | None = None
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSampler(Body, kw_only=True):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class PromptChunk(Body, kw_only=True):
    type: str = "encoded_text"
    tokens: list[Token] = []
    data: Any = None
    format: Any = None
    location: Any = None
    dmel: Any = None
    expected_tokens: Any = None


class SamplePrompt(Body, kw_only=True):
    chunks: list[PromptChunk]


class Params(Body, kw_only=True):
    max_tokens: Count | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str | Token], Meta(max_length=MOST_STOPS)] | None = None
    """Left out: the model's own end token stops. An empty list: nothing does."""
    temperature: float = 1.0
    top_k: TopK = -1
    top_p: float = 1.0


class SampleBody(Body, kw_only=True):
    prompt: SamplePrompt
    sampling_params: Params
    num_samples: Few = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: SequenceNumber | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Meta(ge=1)] | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"


class Retrieve(Body, kw_only=True):
    request_id: str
    allow_metadata_only: bool = False
    """Accepted and without effect: every result is sent whole."""


class CancelFuture(Body, kw_only=True):
    request_id: str


class WeightsInfo(Body, kw_only=True):
    tinker_path: str


class Anything(msgspec.Struct):
    """Telemetry of the client, which is neither read nor kept."""


# --- The protobuf messages of the Tinker API, from the numbers and types of their fields.
#
# The client sends `ForwardBackwardRequest` and reads `ForwardBackwardOutput` and `SampleResponse` as protobuf, everything else as JSON.
# Tensors are little-endian bytes. The field numbers are those of the package `tinker` 0.38.


PROTOBUF = "application/x-protobuf"
FLOAT32, INT64, INT32 = 1, 2, 3
STOPPED, TOO_LONG = 0, 1

_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "SampleResponse": {
        "sequences": (1, "*SampledSequence"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "prompt_cache_hit_tokens": (4, "int32"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "TopkLogprobs": {
        "token_ids": (1, "bytes"),
        "logprobs": (2, "bytes"),
        "k": (3, "uint32"),
        "length": (4, "uint32"),
    },
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "*int64")},
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "*int64"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "{BatchedTensor"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "{double"),
    },
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "{double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "{LossConfigValue"),
    },
    "LossConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "{Tensor")},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "Opaque"), "dmel": (3, "Opaque")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Opaque": {},
}
"""Message -> field -> (number, type). `*` repeats; `{` is a map from text. Fields that are left out here are ignored, as protobuf has it;
enumerations are numbers."""

_PACKAGE = "headrace.tinker"
_KINDS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bytes", "string", "bool", "double", "int32", "uint32", "int64")
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="headrace_tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            if kind.startswith("{"):
                entry = message.nested_type.add(name=f"{field.title().replace('_', '')}Entry")
                entry.options.map_entry = True
                _add(entry, "key", 1, "string")
                _add(entry, "value", 2, kind[1:])
                kind = f"*{name}.{entry.name}"
            _add(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()  # not the default one, in which the client has messages of these names
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def _add(message: Any, name: str, number: int, kind: str) -> None:
    labels = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=number)
    field.label = labels.LABEL_REPEATED if kind.startswith("*") else labels.LABEL_OPTIONAL
    kind = kind.removeprefix("*")
    if kind in _KINDS:
        field.type = _KINDS[kind]
    else:
        field.type, field.type_name = labels.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"


MESSAGES = _classes()
"""The classes by name."""


def read_message(name: str, body: bytes) -> Any:
    """Raises ValueError for bytes that are no such message."""
    from google.protobuf.message import DecodeError

    try:
        return MESSAGES[name].FromString(body)
    except DecodeError as error:
        raise ValueError(f"the body is no {name}: {error}") from None


def pass_output(
    logprobs: Sequence[bytes], widths: Sequence[int], metrics: Mapping[str, float], kind: str = "ArrayRecord"
) -> bytes:
    """The log-probs of every example and the metrics. `widths`: targets a position of each example; neighbours of one width share
    a record, because the trailing shape belongs to a record."""
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type=kind)
    start = 0
    while start < len(logprobs):
        stop = start + 1
        while stop < len(logprobs) and widths[stop] == widths[start]:
            stop += 1
        record = output.loss_fn_outputs.add(type_tag=kind, num_datums=stop - start)
        field = record.fields["logprobs"]
        field.dtype, field.data = FLOAT32, b"".join(logprobs[start:stop])
        offsets = [0]
        for logprob in logprobs[start:stop]:
            offsets.append(offsets[-1] + len(logprob))
        field.offsets = b"".join(offset.to_bytes(8, "little") for offset in offsets)
        if widths[start] > 1:
            field.trailing_shape.append(widths[start])
        start = stop
    for name, value in metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())


# --- The request for a forward or backward pass
# From protobuf to the trainer's call. What can be refused without the model is refused here.


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
    for key, array in inputs.items():
        if array.shape != targets.shape:
            raise Refused(400, f"{place}.{key} has shape {list(array.shape)}, and target_tokens {list(targets.shape)}")
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise Refused(400, f"{place}.sequence_ratio_mask marks no position")
    return Example(
        tokens=tokens.tobytes(),
        targets=_in_range(f"{place}.target_tokens", targets).tobytes(),
        width=targets.shape[1] if targets.ndim == 2 else 1,
        inputs={key: np.ascontiguousarray(array, np.float32).tobytes() for key, array in inputs.items()},
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
    if len(set(zip(*(place.tolist() for place in places), strict=True))) < len(values):
        raise ValueError("it has several values for one place")
    whole = np.zeros(shape, dtype)
    whole[places] = values
    return whole
