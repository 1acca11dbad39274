"""The jagged data plane: ragged rows on the wire, padding only where a reader asks.

``codec`` turns rectangles into ragged columns and back, ``frames`` puts a batch into one buffer, ``open_client`` gives
a client of a transport. Nothing here imports ray or tensordict until it is used.
"""

from spanwise.batch import BatchedDataDict
from spanwise.dataplane.client import DataPlaneClient, open_client
from spanwise.dataplane.codec import (
    materialize,
    maybe_pack_jagged,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
    unwrap_wire_stripped_payload,
)
from spanwise.dataplane.columns import kv_first_write, read_columns, write_columns
from spanwise.dataplane.errors import (
    CapacityExceeded,
    ClaimTimeout,
    ClientClosed,
    CorruptFrame,
    DataPlaneError,
    FieldNotReady,
    GetTimeout,
    LeaseExpired,
    NotSupported,
    PartitionConflict,
    PartitionExhausted,
    PartitionNotFound,
    PutTimeout,
    SampleConflict,
    SampleNotFound,
    SchemaMismatch,
    TaskNotFound,
    TransportDown,
    UnsafeObject,
)
from spanwise.dataplane.frame_format import Header
from spanwise.dataplane.frame_writer import encode_frame
from spanwise.dataplane.frames import Frame, decode_frame, read_header
from spanwise.dataplane.meta import BatchMeta, shard_meta_for_ranks
from spanwise.dataplane.schema import Field, Layout

__all__ = [
    "BatchMeta",
    "BatchedDataDict",
    "CapacityExceeded",
    "ClaimTimeout",
    "ClientClosed",
    "CorruptFrame",
    "DataPlaneClient",
    "DataPlaneError",
    "Field",
    "FieldNotReady",
    "Frame",
    "GetTimeout",
    "Header",
    "Layout",
    "LeaseExpired",
    "NotSupported",
    "PartitionConflict",
    "PartitionExhausted",
    "PartitionNotFound",
    "PutTimeout",
    "SampleConflict",
    "SampleNotFound",
    "SchemaMismatch",
    "TaskNotFound",
    "TransportDown",
    "UnsafeObject",
    "decode_frame",
    "encode_frame",
    "kv_first_write",
    "materialize",
    "maybe_pack_jagged",
    "open_client",
    "pack_jagged_fields",
    "pack_per_token_field",
    "read_columns",
    "read_header",
    "response_from_nested",
    "shard_meta_for_ranks",
    "stack_or_nest",
    "to_nested_by_length",
    "unwrap_wire_stripped_payload",
    "write_columns",
]
