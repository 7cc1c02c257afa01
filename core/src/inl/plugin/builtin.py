"""Built-in plugin: registers the core's backend, models and functions."""

from __future__ import annotations

from inl.device import DeviceInfo, DeviceType
from inl.plugin.builtin_commands import COMMANDS, SUMMARIES
from inl.plugin.hooks import (
    RegisterBackend,
    RegisterCommand,
    RegisterFunctions,
    RegisterModel,
    RegisterPlace,
    hookimpl,
)

FAMILIES = (
    ("ArceeForCausalLM", "arcee", "arcee"),
    ("BambaForCausalLM", "bamba", "bamba"),
    ("CodeGenForCausalLM", "codegen", "gptj"),
    ("CohereForCausalLM", "cohere", "cohere"),
    ("Cohere2ForCausalLM", "cohere2", "cohere2"),
    ("CwmForCausalLM", "cwm", "cwm"),
    ("DeepseekV2ForCausalLM", "deepseek_v2", "deepseek_v2"),
    ("DeepseekV3ForCausalLM", "deepseek_v3", "deepseek_v3"),
    ("DeepseekV32ForCausalLM", "deepseek_v32", "deepseek_v32"),
    ("Dots1ForCausalLM", "dots1", "dots1"),
    ("Ernie4_5ForCausalLM", "ernie4_5", "ernie4_5"),
    ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", "ernie4_5_moe"),
    ("Exaone4ForCausalLM", "exaone4", "exaone4"),
    ("FalconForCausalLM", "falcon", "falcon"),
    ("FalconH1ForCausalLM", "falcon_h1", "falcon_h1"),
    ("GemmaForCausalLM", "gemma", "gemma1"),
    ("Gemma2ForCausalLM", "gemma2", "gemma2"),
    ("Gemma3ForCausalLM", "gemma3_text", "gemma3"),
    ("Gemma3ForConditionalGeneration", "gemma3", "gemma3"),
    ("Gemma4ForCausalLM", "gemma4_text", "gemma4"),
    ("Gemma4ForConditionalGeneration", "gemma4", "gemma4"),
    ("GlmForCausalLM", "glm", "glm"),
    ("Glm4ForCausalLM", "glm4", "glm4"),
    ("Glm4MoeForCausalLM", "glm4_moe", "glm4_moe"),
    ("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "glm4_moe_lite"),
    ("GlmMoeDsaForCausalLM", "glm_moe_dsa", "glm_moe_dsa"),
    ("GPT2LMHeadModel", "gpt2", "gpt2"),
    ("GPTBigCodeForCausalLM", "gpt_bigcode", "gpt_bigcode"),
    ("GPTJForCausalLM", "gptj", "gptj"),
    ("GPTNeoForCausalLM", "gpt_neo", "gpt_neo"),
    ("GPTNeoXForCausalLM", "gpt_neox", "gpt_neox"),
    ("GptOssForCausalLM", "gpt_oss", "gpt_oss"),
    ("GraniteForCausalLM", "granite", "granite"),
    ("GraniteMoeForCausalLM", "granitemoe", "granite_moe"),
    ("GraniteMoeHybridForCausalLM", "granitemoehybrid", "granite_hybrid"),
    ("GraniteMoeSharedForCausalLM", "granitemoeshared", "granite_moe"),
    ("HeliumForCausalLM", "helium", "helium"),
    ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", "hunyuan_v1_dense"),
    ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", "hunyuan_v1_moe"),
    ("Jais2ForCausalLM", "jais2", "jais2"),
    ("Lfm2ForCausalLM", "lfm2", "lfm2"),
    ("Lfm2MoeForCausalLM", "lfm2_moe", "lfm2_moe"),
    ("LlamaForCausalLM", "llama", "llama"),
    ("Llama4ForCausalLM", "llama4_text", "llama4"),
    ("Llama4ForConditionalGeneration", "llama4", "llama4"),
    ("MiMoForCausalLM", "mimo", "qwen2"),
    ("MiniMaxM2ForCausalLM", "minimax_m2", "minimax_m2"),
    ("MinistralForCausalLM", "ministral", "ministral"),
    ("Ministral3ForCausalLM", "ministral3", "ministral3"),
    ("MistralForCausalLM", "mistral", "mistral"),
    ("MixtralForCausalLM", "mixtral", "mixtral"),
    ("NemotronForCausalLM", "nemotron", "nemotron"),
    ("ApertusForCausalLM", "apertus", "apertus"),
    ("ExaoneMoeForCausalLM", "exaone_moe", "exaone_moe"),
    ("NemotronHForCausalLM", "nemotron_h", "nemotron_h"),
    ("OlmoForCausalLM", "olmo", "olmo"),
    ("OlmoeForCausalLM", "olmoe", "olmoe"),
    ("Olmo2ForCausalLM", "olmo2", "olmo2"),
    ("Olmo3ForCausalLM", "olmo3", "olmo3"),
    ("OPTForCausalLM", "opt", "opt"),
    ("PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text", "paddleocr_vl"),
    ("PhiForCausalLM", "phi", "phi"),
    ("Phi3ForCausalLM", "phi3", "phi3"),
    ("Qwen2ForCausalLM", "qwen2", "qwen2"),
    ("Qwen2MoeForCausalLM", "qwen2_moe", "qwen2_moe"),
    ("Qwen3ForCausalLM", "qwen3", "qwen3"),
    ("Qwen3MoeForCausalLM", "qwen3_moe", "qwen3_moe"),
    ("Qwen3NextForCausalLM", "qwen3_next", "qwen3_next"),
    ("Qwen3_5ForCausalLM", "qwen3_5_text", "qwen3_5"),
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", "qwen3_5"),
    ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "qwen3_5_moe"),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", "qwen3_5_moe"),
    ("SeedOssForCausalLM", "seed_oss", "seed_oss"),
    ("SolarOpenForCausalLM", "solar_open", "solar_open"),
    ("StableLmForCausalLM", "stablelm", "stablelm"),
    ("Starcoder2ForCausalLM", "starcoder2", "starcoder2"),
    ("SmolLM3ForCausalLM", "smollm3", "smollm3"),
    ("VaultGemmaForCausalLM", "vaultgemma", "vaultgemma"),
    ("YoutuForCausalLM", "youtu", "youtu"),
    ("MiniCPM3ForCausalLM", "minicpm3", "minicpm3"),
    ("AXK1ForCausalLM", "axk1", "axk1"),
    ("HyperCLOVAXForCausalLM", "hyperclovax", "hyperclovax"),
    ("GraniteSWAForCausalLM", "granite_swa", "granite_swa"),
    ("GraniteMoeSWAForCausalLM", "granitemoe_swa", "granite_moe_swa"),
    ("FlexOlmoForCausalLM", "flex_olmo", "flex_olmo"),
    ("HYV3ForCausalLM", "hy_v3", "hy_v3"),
    ("FlintForCausalLM", "flint", "flint"),
    ("MellumForCausalLM", "mellum", "mellum"),
    ("NanoChatForCausalLM", "nanochat", "nanochat"),
    ("Gemma3nForCausalLM", "gemma3n_text", "gemma3n"),
    ("Gemma3nForConditionalGeneration", "gemma3n", "gemma3n"),
    ("Gemma4UnifiedForCausalLM", "gemma4_unified_text", "gemma4_unified"),
    ("BioGptForCausalLM", "biogpt", "biogpt"),
    ("PersimmonForCausalLM", "persimmon", "persimmon"),
    ("AfmoeForCausalLM", "afmoe", "afmoe"),
    ("Cohere2MoeForCausalLM", "cohere2_moe", "cohere2_moe"),
    ("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", "gemma4_unified"),
    ("FuyuForCausalLM", "fuyu", "persimmon"),
    ("GotOcr2ForConditionalGeneration", "got_ocr2", "qwen2"),
)
"""(``architectures`` entry, ``model_type``, module in ``inl.models``)."""

ENCODERS = (
    ("Bert", "bert", "bert:MODEL"),
    ("ModernBert", "modernbert", "modernbert:MODEL"),
    ("MPNet", "mpnet", "bert:MPNET"),
    ("Roberta", "roberta", "bert:ROBERTA"),
    ("XLMRoberta", "xlm-roberta", "bert:ROBERTA"),
)
"""(stem of ``architectures``, ``model_type``, attribute in ``inl.models``)."""
ENCODER_SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification")


@hookimpl
def inl_register_backends(register: RegisterBackend) -> None:
    """Register the NumPy backend, the reference for all other backends."""
    register(DeviceType.REFERENCE, "inl.backend.reference:ReferenceBackend", probe)


@hookimpl
def inl_register_models(register: RegisterModel) -> None:
    """Register the architectures of ``inl.models``."""
    for architecture, name, module in FAMILIES:
        for key in (architecture, name):
            register(key, f"inl.models.{module}:MODEL")
    for architecture, name, attribute in ENCODERS:
        for key in (name, *(architecture + suffix for suffix in ENCODER_SUFFIXES)):
            register(key, f"inl.models.{attribute}")
    register("DeepForCausalLM", "inl.models.deep:MODEL")
    register("ComplexityModel", "inl.models.deep_v04:MODEL")


@hookimpl
def inl_register_functions(register: RegisterFunctions) -> None:
    """Register the functions for NumPy, torch and JAX arrays."""
    register("numpy", "inl.ops.inl_functions:FUNCTIONS")
    register("torch", "inl_torch.functional:FUNCTIONS")
    register("jax", "inl_jax.functional:FUNCTIONS", ("jax", "jaxlib"))


@hookimpl
def inl_register_places(register: RegisterPlace) -> None:
    """Register child processes, and workers that are started by hand."""
    register("worker", "inl.workers.process:start_child")
    register("join", "inl.workers.join:wait_for_worker")


@hookimpl
def inl_register_commands(register: RegisterCommand) -> None:
    """Register the commands of ``inl.cli``."""
    for name, command in COMMANDS.items():
        register(name, command, SUMMARIES[name])


def probe() -> list[DeviceInfo]:
    """Return the reference device, which is always available."""
    from inl.backend.host import host_memory

    return [DeviceInfo(0, "NumPy reference", host_memory().total)]
