"""Config keys of TRL, verl, AReaL and transformers and their equivalents here, for hints in error messages. No key is renamed."""

from __future__ import annotations

#: Foreign keys -> candidate keys here; the hint gives the first one that the config has.
PLACES: dict[str, tuple[str, ...]] = {}

for _theirs, _places in {
    "learning_rate lr": "actor.optimizer.lr model.optimizer.lr",
    "weight_decay": "actor.optimizer.weight_decay model.optimizer.weight_decay",
    "warmup_ratio lr_warmup_steps_ratio warmup_proportion": (
        "actor.optimizer.warmup_steps_proportion model.optimizer.warmup_steps_proportion"
    ),
    "lr_scheduler lr_scheduler_type scheduler": "actor.optimizer.lr_scheduler_type model.optimizer.lr_scheduler_type",
    "max_grad_norm grad_clip clip_grad gradient_clipping": (
        "actor.optimizer.gradient_clipping model.optimizer.gradient_clipping"
    ),
    "optim optimizer_type": "actor.optimizer.kind model.optimizer.kind",
    "adam_beta1": "actor.optimizer.beta1 model.optimizer.beta1",
    "adam_beta2": "actor.optimizer.beta2 model.optimizer.beta2",
    "adam_epsilon": "actor.optimizer.eps model.optimizer.eps",
    "batch_size train_batch_size per_device_train_batch_size global_batch_size": "train_dataset.batch_size",
    "micro_batch_size ppo_micro_batch_size ppo_max_token_len_per_gpu max_tokens_per_mb": (
        "actor.mb_spec.max_tokens_per_mb model.mb_spec.max_tokens_per_mb"
    ),
    "gradient_accumulation_steps": "actor.mb_spec.n_mbs model.mb_spec.n_mbs",
    "ppo_mini_batch_size num_mini_batches num_iterations": "actor.ppo_n_minibatches",
    "epochs num_epochs num_train_epochs total_epochs": "total_train_epochs",
    "steps max_steps num_steps total_steps total_training_steps": "total_train_steps",
    "max_tokens max_new_tokens max_completion_length max_response_length response_length": "gconfig.max_new_tokens",
    "n num_generations n_samples group_size rollout_n num_samples": "gconfig.n_samples samples",
    "temperature": "gconfig.temperature",
    "top_p": "gconfig.top_p",
    "top_k": "gconfig.top_k",
    "max_prompt_length max_length max_seq_length": "train_dataset.max_length",
    "max_model_len max_model_length context_length": "rollout.context_length",
    "beta kl_coef kl_loss_coef kl_ctl": "actor.kl_ctl",
    "epsilon clip_range clip_ratio cliprange eps_clip": "actor.eps_clip",
    "epsilon_high clip_ratio_high eps_clip_higher": "actor.eps_clip_higher",
    "entropy_coeff entropy_coef": "actor.entropy_coef",
    "algorithm adv_estimator algorithm_type recipe": "actor.recipe",
    "discount gae_gamma gamma gae_lambda lam": "actor.adv_estimator_kwargs",
    "value_clip cliprange_value vf_clip": "critic.eps_clip",
    "critic_warmup": "critic.warmup_steps",
    "loss_type policy_loss": "actor.policy_loss",
    "model model_name model_path model_name_or_path base_model pretrained": "actor.path model.path path",
    "tokenizer tokenizer_name": "tokenizer_path",
    "torch_dtype dtype bf16 fp16": "actor.dtype model.dtype",
    "attn_implementation": "actor.attn_implementation model.attn_implementation",
    "gradient_checkpointing": "actor.gradient_checkpointing model.gradient_checkpointing",
    "dataset dataset_name train_data train_files train_path data": "train_dataset.path dataset.path",
    "eval_dataset val_dataset val_files valid_data test_dataset": "valid_dataset.path dataset.path",
    "reward reward_func reward_funcs reward_function reward_fn_name": "reward_fn",
    "use_vllm backend engine inference_engine": "rollout.backend",
    "tensor_parallel_size tensor_model_parallel_size tp_size": "rollout.tensor_parallel",
    "n_gpus_per_node num_gpus world_size nproc_per_node num_processes": "cluster.processes",
    "output_dir save_dir checkpoint_dir default_local_dir": "cluster.fileroot",
    "run_name wandb_run_name": "trial_name",
    "project project_name wandb_project": "experiment_name",
    "save_steps save_freq save_interval": "saver.every_steps",
    "eval_steps test_freq eval_interval eval_freq": "evaluator.every_steps",
    "save_total_limit": "saver.keep",
    "report_to logger loggers": "stats_logger.sinks",
    "resume resume_from_checkpoint resume_mode": "recover.mode",
}.items():
    PLACES.update(dict.fromkeys(_theirs.split(), tuple(_places.split())))
