"""How each family of transformers is computed: by the trainer on a CPU, and by the embedded engine.

Measured on the miniatures of :mod:`tests.models.families`; the tests of all families (`make test-long`) hold it, and
the table of docs/models.md says the same.
"""

_FAMILIES = {
    ("trees", "slots"): (
        "apertus, apertus1p5_text, arcee, aria_text, axk1, biogpt, bitnet, codegen, cohere, cohere_compass_text, "
        "ctrl, dbrx, deepseek_v2, deepseek_v3, diffllama, dots1, ernie4_5, ernie4_5_moe, exaone, falcon, flex_olmo, "
        "fuyu, gemma, glm, glm4, glm4_moe, glm4_moe_lite, got_ocr2, gpt-sw3, gpt2, gpt_bigcode, gpt_neox, gptj, "
        "granite, granitemoe, granitemoeshared, helium, hrm_text, hunyuan_v1_dense, hunyuan_v1_moe, hy_v3, "
        "hyperclovax, internlm3, iquestcoder, jais2, jetmoe, laguna, llama, longcat_flash, mellum, minicpm3, "
        "minimax_m2, minimax_m3_vl_text, moss_transcribe_diarize, nanochat, nemotron, olmo, olmo2, olmoe, opt, "
        "persimmon, phi, qwen2, qwen2_moe, qwen3, qwen3_moe, sarvam_mla, sarvam_moe, seed_oss, smollm3, solar_open, "
        "stablelm, youtu"
    ),
    ("trees", "caches"): (
        "afmoe, beam, cohere2, cohere2_moe, cwm, doge, exaone4, exaone_moe, flint, gemma2, gemma3, gemma3_text, "
        "gemma3n, gemma3n_text, gemma4, gemma4_text, gemma4_unified, gemma4_unified_text, gpt_neox_japanese, gpt_oss, "
        "granite_swa, granitemoe_swa, kolibri1, llama4, llama4_text, mimo_v2_flash, ministral, ministral3, mistral, "
        "mixtral, modernbert-decoder, olmo3, phi3, phimoe, starcoder2, vaultgemma, xglm"
    ),
    ("padded", "caches"): (
        "axk2, bailing_hybrid, bloom, deepseek_v32, deepseek_v4, dory, dots3_note, dots3_note_text, falcon_h1, "
        "falcon_mamba, glm_moe_dsa, gpt_neo, granitemoehybrid, hy_v4, inkling2_loop_text, inkling2_text, "
        "inkling_text, jamba, kimi_linear, lara_mini, lfm2, lfm2_moe, lfm3, mamba, mamba2, mpt, olmo_hybrid, qwen3_5, "
        "qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, qwen3_next, qwen4_exp, qwen4_exp_text, zamba, zaya"
    ),
    ("padded", "recomputed"): ("bamba, minimax, nemotron_h, openai-gpt, recurrent_gemma, rwkv, xlstm, zamba2"),
}
_WITH_IMAGES = {  # as text, with all their parts
    ("trees", "slots"): (
        "aria, cohere_compass, cosmos3_edge, cosmos3_omni, idefics3, internvl, llava, llava_next, qwen2_5_vl, "
        "qwen2_vl, qwen3_vl, smolvlm"
    ),
    ("trees", "caches"): ("aya_vision, cohere2_vision, gemma3 whole, gemma4 whole, mistral3"),
}


def _by_name(groups: dict[tuple[str, str], str]) -> dict[str, tuple[str, str]]:
    return {name: ways for ways, names in groups.items() for name in names.split(", ")}


WAYS = _by_name(_FAMILIES)  # family -> rows of the trainer, past of the engine
WAYS_WITH_IMAGES = _by_name(_WITH_IMAGES)
