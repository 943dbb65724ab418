"""Bodies of the requests that control a server, in SGLang's form."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from rollwright.inference.server.bodies import Body, NotEmpty
from rollwright.inference.server.exchange import RequestError
from rollwright.inference.weights.group import DEFAULT_GROUP

#: Trajectories store versions as 32-bit integers.
LAST_VERSION = (1 << 31) - 1
_VERSION: Any = Field(None, ge=0, le=LAST_VERSION, description="a whole number: versions count weight updates")


class ControlBody(Body):
    """Base of the bodies of control requests: numbers may be strings, and unknown fields are ignored."""

    model_config = ConfigDict(strict=False, extra="ignore", coerce_numbers_to_str=True)


class Pause(ControlBody):
    """``/pause_generation``."""

    mode: Literal["abort", "retract", "in_place"] = Field("abort", description="one of retract, in_place, abort")


class Abort(ControlBody):
    """``/abort_request``."""

    rid: str = ""
    abort_all: bool = False

    @model_validator(mode="after")
    def _says_which(self) -> Self:
        if not self.abort_all and not self.rid:
            raise RequestError("Give rid, the id of one request in text, or abort_all: true.", param="rid")
        return self


class NewVersion(ControlBody):
    """``/update_weight_version``."""

    new_version: int | None = _VERSION
    abort_all_requests: bool = True


class FromDisk(ControlBody):
    """``/update_weights_from_disk``."""

    model_path: NotEmpty = Field(description="a directory")
    weight_version: int | None = _VERSION
    content_digest: str | None = None
    abort_all_requests: bool = False


class GroupName(ControlBody):
    """``/destroy_weights_update_group``."""

    group_name: str = DEFAULT_GROUP


class JoinGroup(GroupName):
    """``/init_weights_update_group``."""

    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int
    world_size: int = Field(le=1 << 16)
    backend: str = "nccl"

    @model_validator(mode="after")
    def _rank_is_a_servers(self) -> Self:
        if not 0 < self.rank_offset < self.world_size:
            raise RequestError(
                f"rank_offset={self.rank_offset} of world_size={self.world_size}: rank 0 is the trainer, and the server's rank is "
                "below world_size.",
                param="rank_offset",
            )
        return self


class FromDistributed(GroupName):
    """``/update_weights_from_distributed``."""

    names: list[str] = Field(default_factory=list)
    dtypes: list[str] = Field(default_factory=list)
    shapes: list[list[int]] = Field(default_factory=list)
    weight_version: int | None = _VERSION
    abort_all_requests: bool = False
    load_format: Literal["flattened_bucket"] | None = Field(
        None, description="flattened_bucket: all tensors as one flat tensor; null: one after the other"
    )

    @model_validator(mode="after")
    def _one_for_each(self) -> Self:
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            raise RequestError(
                f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes; give one for each."
            )
        return self


class Checker(ControlBody):
    """``/weights_checker``."""

    action: Literal["checksum"] = Field("checksum", description="checksum")


class Memory(ControlBody):
    """``/release_memory_occupation`` and ``/resume_memory_occupation``."""

    tags: list[Literal["kv_cache"]] = Field([], description="a list of kv_cache alone: this engine keeps its weights")
