"""The protobuf messages of the Tinker API, from the numbers and types of their fields.

The client sends `ForwardBackwardRequest` and reads `ForwardBackwardOutput` and `SampleResponse` as protobuf, everything else as JSON.
Tensors are little-endian bytes. The field numbers are those of the package `tinker` 0.38.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


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
        for one in logprobs[start:stop]:
            offsets.append(offsets[-1] + len(one))
        field.offsets = b"".join(offset.to_bytes(8, "little") for offset in offsets)
        if widths[start] > 1:
            field.trailing_shape.append(widths[start])
        start = stop
    for name, value in metrics.items():
        output.metrics[name] = value
    return bytes(output.SerializeToString())
