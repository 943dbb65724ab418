"""Models as training leaves them: adapters, DDP, FSDP, general architectures."""

import numpy as np
import pytest
import torch
from processed_models import reference, small_model, tokenizer

from rollwright.errors import ConfigError
from rollwright.sequence_processing import GenerationConfig, SequenceProcessor
from rollwright.sequence_processing.models import unwrapped

PROMPTS = ["ab+c=", "jihg?"]


def processor_of(model):
    return SequenceProcessor(model, tokenizer(), GenerationConfig(max_new_tokens=10, temperature=0.75), progress=False)


def agrees_with(model, sequences, results):
    """The numbers are those of one plain forward of ``model`` for each sequence."""
    for b in range(len(sequences.prompt_lens)):
        for g in range(len(sequences.gen_lens[b])):
            p, n = sequences.prompt_lens[b], sequences.gen_lens[b][g]
            logprobs, entropy = reference(model, sequences.sequences[b, g, : p + n].tolist(), p, 0.75)
            torch.testing.assert_close(results.logprobs[b][g].detach().double(), logprobs.detach(), atol=1e-4, rtol=1e-4)
            np.testing.assert_allclose(results.entropies[b][g], entropy.detach(), atol=1e-4, rtol=1e-4)


@pytest.fixture
def group(monkeypatch):
    """A process group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def lora_model():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.3)
    model = peft.get_peft_model(small_model(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def test_adapters_are_sampled_and_scored_as_they_are_and_get_the_gradient():
    model = lora_model().train()
    sequences, results = processor_of(model).generate_with_logprobs(PROMPTS, 4, seed=1, with_grad=True)
    sum(piece.sum() for row in results.logprobs for piece in row).backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    model.eval()
    agrees_with(model, sequences, results)
    with model.disable_adapter():
        base = processor_of(model).generate_batched(PROMPTS, 4, seed=1)
    assert sequences.share_changed(base) > 0
    assert sequences.share_changed(processor_of(model.merge_and_unload()).generate_batched(PROMPTS, 4, seed=1)) == 0


def test_learned_prompts_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(small_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ConfigError, match="learned prompt"):
        processor_of(model)


def test_ddp_is_unwrapped(group):
    model = small_model()
    expected = processor_of(model).generate_with_logprobs(PROMPTS, 2, seed=1)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert unwrapped(wrapped) is model
    found = processor_of(wrapped).generate_with_logprobs(PROMPTS, 2, seed=1, with_grad=True)
    assert expected[0].share_changed(found[0]) == 0
    agrees_with(model, *found)


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_is_gathered_to_sample_and_gets_the_gradient(group, version):
    plain, model = small_model(), small_model()
    if version == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        wrapped = fully_shard(model)
    expected = processor_of(plain).generate_batched(PROMPTS, 2, seed=1)
    sequences, results = processor_of(wrapped).generate_with_logprobs(PROMPTS, 2, seed=1, with_grad=True)
    assert expected.share_changed(sequences) == 0
    agrees_with(plain, sequences, results)
    sum(piece.sum() for row in results.logprobs for piece in row).backward()
    assert all(parameter.grad is not None for parameter in wrapped.parameters())
    agrees_with(plain, sequences, processor_of(wrapped).teacher_force_logprobs(sequences))


def test_weights_that_an_optimizer_changed_are_sampled_from():
    model = small_model()
    processor = processor_of(model)
    before = processor.generate_batched(PROMPTS, 4, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _, results = processor.generate_with_logprobs(PROMPTS, 2, seed=1, with_grad=True)
    (-results.logprobs[0][0].sum()).backward()
    optimizer.step()
    sequences, results = processor.generate_with_logprobs(PROMPTS, 4, seed=1)
    assert before.share_changed(sequences) > 0
    agrees_with(model, sequences, results)


def test_any_architecture_goes():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer()), n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=tokenizer().eos_token_id
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    agrees_with(model, *processor_of(model).generate_with_logprobs(PROMPTS, 2, seed=1))


def test_a_module_that_is_no_language_model_is_refused():
    with pytest.raises(ConfigError, match="Linear has no config"):
        SequenceProcessor(torch.nn.Linear(2, 2), tokenizer())
