"""Reinforcement learning with verifiable rewards for models that see: images with the prompt."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.vision import (
    IMAGE,
    VISION_PIECES,
    as_images,
    image_placeholder,
    load_processor,
    multi_modal_outputs,
    place_images,
)
from rollwright.errors import ConfigError
from rollwright.experience.contract import MULTI_MODAL
from rollwright.experience.trajectory import Trajectory, concat_padded_tensors
from rollwright.inference.engine import InferenceEngine
from rollwright.inference.request import ModelRequest
from rollwright.rewards.wrapper import AsyncRewardWrapper
from rollwright.tracking.metrics import get_tracker
from rollwright.workflows.base import RolloutWorkflow
from rollwright.workflows.dumping import dump_sample, task_name
from rollwright.workflows.prompting import PromptFunction, as_gconfig, as_tokenizer, extract_messages
from rollwright.workflows.registry import WORKFLOWS, resolve_function
from rollwright.workflows.rlvr import single_turn_row


def extract_prompt(data: dict[str, Any]) -> Any:
    """The task's ``messages``: a conversation, or its text as a chat template rendered it."""
    return data["messages"] if isinstance(data.get("messages"), str) else extract_messages(data)


@WORKFLOWS.register_module("vision_rlvr")
class VisionRLVRWorkflow(RolloutWorkflow):
    """Show images, ask once, score the answer.

    A task has ``messages`` (or a prompt in text) and ``images``: PIL images, their bytes or their files. Where they stand in the
    prompt is said by image blocks or ``<image>``; without either they stand before the first message of the user. A response
    that contains an image token ends there: such a token stands for an image that does not exist.

    Args:
        reward_fn: function ``(prompt, completion, prompt_ids, completion_ids, **data) -> float``, plain or async, or its
            registered name or import path. The images are in ``data`` for functions that ask for them.
        gconfig: how completions are sampled.
        tokenizer: the policy's tokenizer, or its path or name.
        processor: a processor, called as ``processor(images=…, text=…, padding=False, return_tensors="pt")``, or its directory
            or name; None: that of the directory that the tokenizer came from.
        enable_thinking: given to chat templates that know it.
        rollout_stat_scope: scope that reward, lengths and share of truncated completions are reported under.
        dump_dir: where each sample is written to, readable; None: nowhere.
        data_extract_prompt_fn: ``(task) -> prompt``, or its import path; None: the task's ``messages``.
        image_key: column that holds the images.
        reward_timeout: seconds that the reward function may take.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any = None,
        enable_thinking: bool = False,
        rollout_stat_scope: str = "rollout",
        dump_dir: str | None = None,
        data_extract_prompt_fn: PromptFunction | str | None = None,
        image_key: str = "images",
        reward_timeout: float = 15.0,
    ) -> None:
        self.tokenizer = as_tokenizer(tokenizer)
        if processor is None:
            processor = getattr(self.tokenizer, "name_or_path", "")
            if not processor:
                raise ConfigError(
                    "VisionRLVRWorkflow: the tokenizer came from no directory; give `processor`, or its directory."
                )
        self.processor = load_processor(processor, self.tokenizer)
        self.placeholder = image_placeholder(self.processor)
        gconfig = as_gconfig(gconfig, self.tokenizer)
        image_tokens = [self.tokenizer.convert_tokens_to_ids(piece) for piece in self._image_pieces()]
        self.gconfig = gconfig.new(stop_token_ids=list(dict.fromkeys([*gconfig.stop_token_ids, *image_tokens])))
        self.async_reward_fn = AsyncRewardWrapper(reward_fn, timeout_seconds=reward_timeout)
        self.enable_thinking = enable_thinking
        self.rollout_stat_scope = rollout_stat_scope
        self.dump_dir = dump_dir
        self.data_extract_prompt_fn = resolve_function(data_extract_prompt_fn or extract_prompt, "data_extract_prompt_fn")
        self.image_key = image_key

    def _image_pieces(self) -> list[str]:
        known = self.tokenizer.get_vocab()
        return [piece for piece in (*VISION_PIECES, getattr(self.processor, "image_token", IMAGE)) if piece in known]

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        """Run one episode; see :class:`RolloutWorkflow`."""
        images, prompt_ids, seen = await asyncio.to_thread(self._process, data)
        samples = (self._sample(engine, data, images, prompt_ids, seen) for _ in range(self.gconfig.n_samples))
        rows = [row for row in await asyncio.gather(*samples) if row is not None]
        return concat_padded_tensors(rows) if len(rows) == self.gconfig.n_samples else None  # a group is whole or not at all

    def _process(self, data: dict[str, Any]) -> tuple[list[Any], list[int], dict[str, Any]]:
        """Images, prompt ids with every image token, and what the model takes of the images."""
        images = as_images(data.get(self.image_key) or [], f"task {task_name(data)}")
        prompt = place_images(self.data_extract_prompt_fn(data), len(images), self.placeholder)
        if not isinstance(prompt, str):
            prompt = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True, enable_thinking=self.enable_thinking
            )
        processed = self.processor(images=images or None, text=prompt, padding=False, return_tensors="pt")
        ids = processed["input_ids"][0]
        return images, ids.tolist() if hasattr(ids, "tolist") else list(ids), multi_modal_outputs(processed) if images else {}

    async def _sample(
        self, engine: InferenceEngine, data: dict[str, Any], images: list[Any], prompt_ids: list[int], seen: dict[str, Any]
    ) -> Trajectory | None:
        request = ModelRequest(
            rid=uuid.uuid4().hex,
            input_ids=prompt_ids,
            gconfig=self.gconfig.new(n_samples=1),
            tokenizer=self.tokenizer,
            multi_modal=seen or None,
            image_data=images or None,
        )
        response = await engine.agenerate(request)
        if response.stop_reason == "abort":
            return None
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        completion = self.tokenizer.decode(response.output_tokens, skip_special_tokens=self.gconfig.skip_special_tokens)
        reward = await self.async_reward_fn(prompt, completion, prompt_ids, response.output_tokens, **data)
        get_tracker(self.rollout_stat_scope).scalar(
            reward=reward,
            images=len(images),
            prompt_tokens=len(prompt_ids),
            response_tokens=response.output_len,
            truncated=response.truncated,
        )
        if self.dump_dir is not None:
            await dump_sample(
                self.dump_dir,
                version=min(response.output_versions, default=0),
                task=task_name(data),
                sections={"prompt": prompt, "completion": completion},
                facts={
                    "reward": reward,
                    "images": ", ".join(f"{image.width}x{image.height}" for image in images),
                    "tokens": f"{len(prompt_ids)} + {response.output_len}",
                    "stopped by": response.stop_reason,
                },
            )
        return {**single_turn_row(response, reward), MULTI_MODAL: [seen or None]}
