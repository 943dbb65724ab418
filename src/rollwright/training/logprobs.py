"""Log-probabilities of given tokens under a model, one micro-batch at a time.

Only the hidden states of requested tokens go through the output layer. A row's log-probabilities equal those of the model's own,
unmodified forward pass of this row alone. In a row with branches, ``inference.attention_masks`` defines what a token sees, and attention
windows and chunks are measured in positions: if the ``position_ids`` of a branch continue those of the trunk, the branch's tokens have the
same log-probabilities as in a row of only the trunk and this branch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollwright.errors import TrainingError
from rollwright.experience.contract import ROUTED_EXPERTS
from rollwright.experience.trajectory import MULTI_MODAL, Trajectory, row_lengths
from rollwright.inference.attention_masks import VisibleTokens, branch_attention, last_visible, only_visible
from rollwright.inference.model_facts import fixed_frequencies, frequency_groups
from rollwright.inference.routed_experts import Replay, Routers, routing
from rollwright.training.layers import candidate_logprobs, output_logprobs, selected_logprobs
from rollwright.training.prefix_tree import PrefixTree
from rollwright.training.tree_attention import over_tree


class TokenScorer(nn.Module):
    """A Hugging Face causal model as a function from tokens to their log-probabilities.

    It is a module so that FSDP can wrap it: the output layer is called inside its forward pass.
    """

    #: Arguments of a forward pass whose scores show whether two ways to compute a row agree.
    check_options: ClassVar[dict[str, Any]] = {}

    #: The model is the one whose choice of experts a batch's ``routed_experts`` record.
    replays_experts = True

    def __init__(self, model: nn.Module, *, chunk_bytes: int = 256 << 20) -> None:
        """
        Args:
            model: a Hugging Face model.
            chunk_bytes: size in bytes of the float32 logits that are held at a time.
        """
        super().__init__()
        self.model = model
        self.chunk_bytes = chunk_bytes
        self.frequencies_vary = fixed_frequencies(model.config) is not None
        self._head_applies: bool | None = None  # determined with the first batch
        self._routers: Routers | None = None  # found with the first record of experts

    def forward(
        self,
        batch: Trajectory,
        wanted_BL: Tensor,
        *,
        with_entropy: bool = False,
        entropy_gradient: bool = True,
        candidates_BLK: Tensor | None = None,
        hidden: bool = False,
    ) -> tuple[Tensor, ...]:
        """Compute the log-probabilities, and optionally the entropies, of the wanted tokens.

        Args:
            batch: ``input_ids [B, L]`` and optionally ``attention_mask``, ``position_ids``, ``branch_ids``, ``routed_experts [B, L, W]``,
                ``temperature [B]`` and multi-modal inputs. Rows are right-padded.
            wanted_BL: bool mask of the tokens to score; column 0 has no log-probability and must be false.
            with_entropy: compute entropies too.
            entropy_gradient: let gradients flow through the entropies.
            candidates_BLK: further token ids for the place of each token, whose log-probabilities are computed as well.
            hidden: return ``hidden_states`` and ``wanted_BL`` instead, for a value head on this model.

        Returns:
            ``logprobs_BL`` and ``entropy_BL``, float32, 0 at tokens outside ``wanted_BL``. The entropy at a token is the entropy of the
            distribution that predicts this token. With candidates, a third tensor has their log-probabilities, ``[B, L, K]``.

        Raises:
            TrainingError: the model cannot compute the rows, or cannot compute them in one batch.
        """
        if hidden:
            return self.hidden_states(batch, wanted_BL), wanted_BL
        ids_BL = batch["input_ids"]
        tree: PrefixTree | None = batch.get("prefix_tree")
        at = wanted_BL.nonzero(as_tuple=True)
        labels_T = ids_BL[at]
        given = batch.get("temperature")
        temperature_B = torch.ones(len(ids_BL), device=ids_BL.device) if given is None else given.float()
        temperature_T = temperature_B[at[0]]
        predictor = _predictors(batch, at)
        candidates = None if candidates_BLK is None else (*predictor, candidates_BLK[at], temperature_T)
        copies_T: Tensor | None = None
        if tree is not None and bool(tree.repeated[at].any()):  # score tokens that several rows share only once
            first_T, copies_T = _first_of_equal(tree.place[at], temperature_T)
            predictor = predictor[0][first_T], predictor[1][first_T]
            labels_T, temperature_T = labels_T[first_T], temperature_T[first_T]
        outputs = self._outputs(batch)
        if self._head_applies:
            hidden_BLH = outputs.last_hidden_state
            logprobs_T, entropy_T = output_logprobs(
                self.model.get_output_embeddings(),  # type: ignore[operator]
                hidden_BLH.flatten(0, 1).index_select(0, predictor[0] * hidden_BLH.shape[1] + predictor[1]),
                labels_T,
                temperature_T,
                with_entropy=with_entropy,
                entropy_gradient=entropy_gradient,
                chunk_bytes=self.chunk_bytes,
            )
        else:
            logits_TV = outputs.logits[predictor]
            logprobs_T, entropy_T = selected_logprobs(
                logits_TV, labels_T, temperature_T, with_entropy=with_entropy, entropy_gradient=entropy_gradient
            )
        if copies_T is not None:
            logprobs_T, entropy_T = logprobs_T[copies_T], entropy_T[copies_T]
        empty_BL = torch.zeros(wanted_BL.shape, dtype=logprobs_T.dtype, device=ids_BL.device)
        scores = empty_BL.index_put(at, logprobs_T), empty_BL.index_put(at, entropy_T)
        if candidates is None:
            return scores
        found_TK = self._candidate_logprobs(outputs, *candidates)
        return *scores, found_TK.new_zeros(*wanted_BL.shape, found_TK.shape[1]).index_put(at, found_TK)

    def _candidate_logprobs(
        self, outputs: Any, row_T: Tensor, column_T: Tensor, candidates_TK: Tensor, temperature_T: Tensor
    ) -> Tensor:
        head: Any = self.model.get_output_embeddings() if self._head_applies else nn.Identity()  # type: ignore[operator]
        inputs_BLH = outputs.last_hidden_state if self._head_applies else outputs.logits
        vocabulary = head.weight.shape[0] if self._head_applies else inputs_BLH.shape[-1]
        if candidates_TK.numel() and int(candidates_TK.max()) >= vocabulary:
            raise TrainingError(
                f"Token {int(candidates_TK.max())} is among a teacher's most likely tokens, and {type(self.model).__name__} has {vocabulary}: the "
                "teacher's vocabulary is larger. Use distillation.loss advantage, k1, k2 or k3, which compare only the sampled tokens."
            )
        chunk_tokens = max(1, self.chunk_bytes // (4 * int(vocabulary)))
        return candidate_logprobs(head, inputs_BLH[row_T, column_T], candidates_TK, temperature_T, chunk_tokens)

    def hidden_states(self, batch: Trajectory, wanted_BL: Tensor) -> Tensor:
        """Return the last hidden states ``[T, H]`` that predict the wanted tokens, row by row.

        If the batch has ``ends [B, L]``, the states at these tokens follow, from which the tokens after them would be predicted.

        Raises:
            TrainingError: the model cannot compute the rows.
        """
        rows, columns = _predictors(batch, wanted_BL.nonzero(as_tuple=True))
        if batch.get("ends") is not None:
            at = (batch["ends"] & batch["attention_mask"].bool()).nonzero(as_tuple=True)
            tree = batch.get("prefix_tree")
            own = at if tree is None else (torch.zeros_like(at[0]), tree.place[at])
            rows, columns = torch.cat([rows, own[0]]), torch.cat([columns, own[1]])
        states_BLH = self._outputs(batch, is_hidden=True).last_hidden_state
        return states_BLH.flatten(0, 1).index_select(0, rows * states_BLH.shape[1] + columns)

    def _outputs(self, batch: Trajectory, *, is_hidden: bool = False) -> Any:
        """Run the model: without its output layer if the hidden states suffice."""
        if self.frequencies_vary:
            refuse_mixed_frequencies(batch, self.model)
        tree: PrefixTree | None = batch.get("prefix_tree")
        inputs = model_inputs(batch, self.model) if tree is None else tree_inputs(batch, tree, self.model)
        if self._head_applies is None:
            self._head_applies = self._applies_head(inputs)
        with _attention_of(batch, tree, self.model), routing(self._replay(batch, tree)):
            runs_base = is_hidden or self._head_applies
            outputs = (self.model.base_model if runs_base else self.model)(**inputs, use_cache=False)  # type: ignore[operator]
        if tree is not None and tree.refusal and not tree.is_tried:
            raise TrainingError(
                f"{type(self.model).__name__} cannot share prefixes in this batch: {tree.refusal}. Set actor.share_prefixes=false, and "
                "the same in ref and critic if they are given."
            )
        return outputs

    def _replay(self, batch: Trajectory, tree: PrefixTree | None) -> Replay | None:
        """Return what sends the batch's tokens to the experts that sampling chose, or None if nothing is recorded.

        Raises:
            ConfigError: the experts of this model cannot be replayed.
            TrainingError: the record is that of another model.
        """
        routed_BLW = batch.get(ROUTED_EXPERTS) if self.replays_experts else None
        if routed_BLW is None:
            return None
        if self._routers is None:
            self._routers = Routers.of(self.model)
        routers, (width, largest) = self._routers, (routed_BLW.shape[2], int(routed_BLW.max()))
        if width != routers.width or largest > routers.experts:
            raise TrainingError(
                f"{ROUTED_EXPERTS} has {width} entries for each token, the largest {largest}; {type(self.model).__name__} has "
                f"{routers.layers} layers with {routers.top_k} of {routers.experts} experts, {routers.width} entries: the rows were "
                "sampled by another model. Set rollout.routing_replay to false, or sample with the policy."
            )
        routed_TW = routed_BLW.flatten(0, 1)
        return Replay(routers, routed_TW if tree is None else routed_TW[tree.sources])

    @torch.no_grad()
    def _applies_head(self, inputs: dict[str, Any]) -> bool:
        """Return whether the logits are exactly the output layer applied to the base model's last hidden state.

        Some models scale or cap their logits after the output layer. A cap is read from the configuration, because small logits hardly
        show it. Anything else is detected by computing some tokens of the first batch both ways.
        """
        model: Any = self.model
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        is_capped = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
        if head is None or not hasattr(head, "weight") or getattr(model, "base_model", model) is model or is_capped:
            return False
        ids = inputs["input_ids"][:1, :8]
        expected = model(input_ids=ids, use_cache=False).logits
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return torch.allclose(head(hidden).float(), expected.float(), rtol=1e-3, atol=1e-4)


def _predictors(batch: Trajectory, at: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return row and column of the hidden state that predicts each token ``at``, in the layout that the model computes."""
    tree: PrefixTree | None = batch.get("prefix_tree")
    if tree is not None:
        return torch.zeros_like(at[0]), tree.predictor[at]
    if batch.get("branch_ids") is not None:
        return at[0], last_visible(batch["branch_ids"])[at]
    return at[0], at[1] - 1


def own_lengths(batch: Trajectory) -> list[int]:
    """Return each row's highest position plus one; without ``position_ids``, this is its number of tokens."""
    lengths_B = row_lengths(batch)
    positions_BL = batch.get("position_ids")
    if positions_BL is None:
        return lengths_B.tolist()
    columns_L = torch.arange(positions_BL.shape[1], device=positions_BL.device)
    own_BL = positions_BL.masked_fill(columns_L >= lengths_B[:, None].to(positions_BL.device), -1)
    return (own_BL.amax(1) + 1).tolist() if own_BL.shape[0] else []


def refuse_mixed_frequencies(batch: Trajectory, model: Any) -> None:
    """Raise an error if a row or branch would be computed with the rotary frequencies of a longer one.

    Raises:
        TrainingError: the rows and branches need different rotary frequencies.
    """
    lengths = [*own_lengths(batch), *_lengths_of_branches(batch)]
    if len(set(frequency_groups(model.config, lengths))) > 1:
        raise TrainingError(
            f"A micro-batch of {type(model).__name__} has rows or branches that end at positions {min(lengths)} and {max(lengths)}, and "
            "the model's rotary frequencies (rope_type: longrope) differ between them: score them separately, and if the branches of a row end "
            "on both sides of original_max_position_embeddings, use one row for each branch."
        )


def _lengths_of_branches(batch: Trajectory) -> list[int]:
    """Return each branch's highest position plus one."""
    branches_BL = batch.get("branch_ids")
    if branches_BL is None:
        return []
    columns_L = torch.arange(branches_BL.shape[1], device=branches_BL.device)
    is_own_BL = (branches_BL > 0) & (columns_L < row_lengths(batch)[:, None].to(branches_BL.device))
    positions_BL = columns_L.expand_as(branches_BL) if batch.get("position_ids") is None else batch["position_ids"]
    row_T, branch_T = is_own_BL.nonzero()[:, 0], branches_BL[is_own_BL]
    kinds, kind_T = torch.unique(torch.stack([row_T, branch_T], 1), dim=0, return_inverse=True)
    highest = torch.zeros(len(kinds), dtype=torch.long, device=branches_BL.device)
    return (highest.scatter_reduce(0, kind_T, positions_BL[is_own_BL].long(), "amax") + 1).tolist()


@contextlib.contextmanager
def _attention_of(batch: Trajectory, tree: PrefixTree | None, model: Any) -> Iterator[None]:
    """Set up attention for the model's forward pass: plain causal, with branches, or over a prefix tree."""
    branches_BL = batch.get("branch_ids")
    if tree is not None:
        with over_tree(model):
            yield
    elif branches_BL is not None:
        positions_BL = batch.get("position_ids")
        if positions_BL is None:
            positions_BL = torch.arange(branches_BL.shape[1], device=branches_BL.device).expand(branches_BL.shape)
        choice = VisibleTokens(branch_attention(branches_BL), positions_BL, positions_BL)
        with only_visible(choice):
            yield
        choice.require_use(model)
    else:
        yield


def _first_of_equal(place_T: Tensor, temperature_T: Tensor) -> tuple[Tensor, Tensor]:
    """Group tokens by layout index and temperature. Returns the first token of each group, and the group of each token."""
    kinds, kind_T = torch.unique(torch.stack([place_T.double(), temperature_T.double()], -1), dim=0, return_inverse=True)
    numbers_T = torch.arange(len(kind_T), device=kind_T.device)
    first = numbers_T.new_full((len(kinds),), len(kind_T)).scatter_reduce(0, kind_T, numbers_T, "amin")
    return first, kind_T


def model_inputs(batch: Trajectory, model: nn.Module) -> dict[str, Any]:
    """Build the arguments of a Hugging Face model for a micro-batch.

    Right-padded rows need no mask under causal attention, because no token attends to its right. Without a mask, the attention
    kernel can use its faster causal path.

    Raises:
        TrainingError: a row is left-padded or has gaps, or the rows cannot share a forward pass.
    """
    ids_BL = batch["input_ids"]
    mask_BL = batch.get("attention_mask")
    inputs: dict[str, Any] = {"input_ids": ids_BL}
    if mask_BL is not None and bool((mask_BL[:, 1:].int() > mask_BL[:, :-1].int()).any()):
        raise TrainingError("A row's attention_mask has a 0 before a 1: rows must be right-padded without gaps.")
    if batch.get("position_ids") is not None or batch.get("branch_ids") is not None:
        inputs |= _positions(batch, model)
    if any(batch.get(MULTI_MODAL) or []):
        if mask_BL is not None:
            inputs["attention_mask"] = mask_BL.to(torch.long)
        inputs["input_ids"] = ids_BL = _without_sampled_images(batch, model.config)
        inputs |= _picture_inputs(batch[MULTI_MODAL], ids_BL, model)
    return inputs


def _positions(batch: Trajectory, model: Any) -> dict[str, Tensor]:
    """Return the batch's positions and a mask of ones. Without a mask, transformers treats jumps in positions as packed sequences."""
    ids_BL = batch["input_ids"]
    found = {"attention_mask": torch.ones_like(ids_BL)}
    positions_BL = batch.get("position_ids")
    if positions_BL is None:
        return found
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(inner.forward).parameters
    if "input_ids" in parameters and "position_ids" not in parameters:
        raise TrainingError(f"The batch has position_ids, but {type(model).__name__} does not accept them.")
    columns_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
    padding_BL = columns_L >= row_lengths(batch)[:, None].to(ids_BL.device)
    attention = str(model.config.get_text_config()._attn_implementation)
    jumps_BL = (positions_BL[:, 1:] != positions_BL[:, :-1] + 1) & ~padding_BL[:, 1:]
    if "flash" in attention and bool(jumps_BL.any()):
        raise TrainingError(f"attn_implementation={attention} treats jumps in position_ids as packed sequences: use sdpa.")
    return found | {"position_ids": positions_BL.masked_fill(padding_BL, 0)}


def tree_inputs(batch: Trajectory, tree: PrefixTree, model: Any) -> dict[str, Any]:
    """Build the arguments of a Hugging Face model for the distinct tokens of a micro-batch, whose rows are in the tree's order.

    Models pass a 4-D mask to their layers unchanged, so the 4-D mask of NaN avoids a ``[T, T]`` mask, and a layer that uses it instead of
    the tree computes NaN. An image is computed once, with the first row that has its tokens. Tokens and images keep the positions that
    they have in their rows.
    """
    mask = torch.full((1, 1, 1, 1), torch.nan, device=tree.place.device)
    inputs = {"input_ids": tree.input_ids, "position_ids": tree.position_ids, "attention_mask": mask, "prefix_tree": tree}
    pictures = batch.get(MULTI_MODAL) or []
    if not any(pictures):
        return inputs
    padded = model_inputs({name: value for name, value in batch.items() if name != "prefix_tree"}, model)
    inputs["input_ids"] = padded["input_ids"].reshape(-1)[tree.sources][None]
    stands_BL = torch.isin(padded["input_ids"], torch.tensor(picture_ids(model.config), device=tree.place.device))
    computes_B = (stands_BL & ~tree.repeated).any(1).tolist()
    first = [entry if computes else None for entry, computes in zip(pictures, computes_B, strict=True)]
    inputs |= _picture_inputs(first, inputs["input_ids"], model)
    rope_index = getattr(model.base_model, "get_rope_index", None)
    if rope_index is not None and "position_ids" not in padded:  # rotary positions of pictures have three axes
        wanted = inspect.signature(rope_index).parameters
        positions_3BL, _ = rope_index(**{name: value for name, value in padded.items() if name in wanted})
        inputs["position_ids"] = positions_3BL.flatten(1)[:, tree.sources][:, None]
    return inputs


#: Processor outputs that have one entry per token. They are ignored, because the trainer's rows have their own.
_TOKEN_OUTPUTS = {"input_ids", "attention_mask", "mm_token_type_ids"}


def _without_sampled_images(batch: Trajectory, config: Any) -> Tensor:
    """Return ``input_ids`` with sampled image tokens replaced by another token, because no image belongs to them.

    A sampled image token ends its row (``VisionRLVRWorkflow`` stops there), so nothing is computed from it.
    """
    ids_BL = batch["input_ids"]
    if batch.get("loss_mask") is None:
        return ids_BL
    images = torch.tensor(picture_ids(config), dtype=torch.long, device=ids_BL.device)
    return ids_BL.masked_fill(torch.isin(ids_BL, images) & (batch["loss_mask"] > 0), 0)


def picture_ids(config: Any) -> list[int]:
    """Return the placeholder tokens of images and videos, from a model's configuration."""
    found = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in found if token is not None]


def _picture_inputs(entries: list[dict[str, Tensor] | None], ids_BL: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Join the images of all rows in row order. If the model takes ``mm_token_type_ids``, add the modality of each token."""
    pictures = [entry for entry in entries if entry]
    names = [name for name in dict.fromkeys(key for entry in pictures for key in entry) if name not in _TOKEN_OUTPUTS]
    inputs = {name: torch.cat([entry[name] for entry in pictures if name in entry]).to(ids_BL.device) for name in names}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        config: Any = model.config
        kinds_BL = torch.zeros_like(ids_BL)
        for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
            if getattr(config, name, None) is not None:
                kinds_BL[ids_BL == getattr(config, name)] = kind
        inputs["mm_token_type_ids"] = kinds_BL
    return inputs
