"""Reinforcement learning with verifiable rewards for vision-language models: prompts with images."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollwright.config.generation import GenerationHyperparameters
from rollwright.data.chat_template import prompt_text
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
from rollwright.workflows.episode import PromptFunction, extract_messages, task_name
from rollwright.workflows.registry import WORKFLOWS
from rollwright.workflows.rlvr import Prompt, RLVRWorkflow


def extract_prompt(data: dict[str, Any]) -> Any:
    """Return the task's ``messages``: a conversation, or text that a chat template has rendered."""
    return data["messages"] if isinstance(data.get("messages"), str) else extract_messages(data)


@WORKFLOWS.register_module("vision_rlvr")
class VisionRLVRWorkflow(RLVRWorkflow):
    """Samples one answer about images and scores it.

    A task has ``messages`` (or a text prompt) and ``images``: PIL images, their bytes or their files. Image blocks or ``<image>``
    mark their positions in the prompt; without either, they are put before the user's first message. A response ends at an image
    token, because there is no image for it.

    Args:
        reward_fn: scores the completion; the images are in its ``data``.
        processor: a processor, called as ``processor(images=…, text=…, padding=False, return_tensors="pt")``, or its directory
            or name. If None, it is loaded from the tokenizer's directory.
        image_key: column that holds the images.

    The other arguments are those of :class:`EpisodeWorkflow`.
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
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            enable_thinking,
            rollout_stat_scope,
            dump_dir,
            data_extract_prompt_fn=data_extract_prompt_fn or extract_prompt,
            reward_timeout=reward_timeout,
        )
        if processor is None:
            processor = getattr(self.tokenizer, "name_or_path", "")
            if not processor:
                raise ConfigError(
                    "VisionRLVRWorkflow: the tokenizer came from no directory; give `processor`, or its directory."
                )
        self.processor = load_processor(processor, self.tokenizer)
        self.placeholder = image_placeholder(self.processor)
        known = self.tokenizer.get_vocab()
        pieces = (*VISION_PIECES, getattr(self.processor, "image_token", IMAGE))
        image_tokens = [known[piece] for piece in pieces if piece in known]
        self.gconfig = self.gconfig.new(stop_token_ids=list(dict.fromkeys([*self.gconfig.stop_token_ids, *image_tokens])))
        self.image_key = image_key

    async def prompt(self, data: dict[str, Any]) -> Prompt:
        """Make the prompt of a task."""
        return await asyncio.to_thread(self._process, data)

    def _process(self, data: dict[str, Any]) -> Prompt:
        """Compute the prompt ids with all image tokens, and the model inputs of the images."""
        images = as_images(data.get(self.image_key) or [], f"task {task_name(data)}")
        prompt = place_images(self.data_extract_prompt_fn(data), len(images), self.placeholder)
        if not isinstance(prompt, str):
            prompt = prompt_text(self.tokenizer, prompt, enable_thinking=self.enable_thinking)
        processed = self.processor(images=images or None, text=prompt, padding=False, return_tensors="pt")
        ids = processed["input_ids"][0]
        seen = multi_modal_outputs(processed) if images else None
        return Prompt(
            ids=ids.tolist() if hasattr(ids, "tolist") else list(ids),
            inputs={"multi_modal": seen, "image_data": images or None},
            columns={MULTI_MODAL: [seen]},
            statistics={"images": len(images)},
            facts={"images": ", ".join(f"{image.width}x{image.height}" for image in images)},
        )
