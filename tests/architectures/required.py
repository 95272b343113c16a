"""The architectures that users bring most."""

from collections.abc import Iterator

from tests.architectures.architecture import Architecture, mixture, scored_model, stock_model
from tests.architectures.batches import image, image_text, pair, patches, sound, text, transcript
from tests.architectures.configs import CONVOLVED, DEEP, LATENT, MROPE


def required() -> Iterator[Architecture]:
    """The architectures that users bring most."""
    yield stock_model("llama", "LlamaForCausalLM", text)
    yield stock_model(
        "llama4_text", "Llama4ForCausalLM", text, num_hidden_layers=4, intermediate_size_mlp=64, attention_chunk_size=8
    )
    yield stock_model("qwen2", "Qwen2ForCausalLM", text)
    yield stock_model("qwen3", "Qwen3ForCausalLM", text)
    yield stock_model(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        text,
        num_hidden_layers=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    yield stock_model("mistral", "MistralForCausalLM", text)
    yield stock_model("gemma", "GemmaForCausalLM", text)
    yield stock_model("gemma2", "Gemma2ForCausalLM", text, num_hidden_layers=4)
    yield stock_model(
        "gemma3_text",
        "Gemma3ForCausalLM",
        text,
        num_hidden_layers=5,
        layer_types=[*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
    )
    yield stock_model(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        text,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
    )
    yield stock_model("phi", "PhiForCausalLM", text)
    yield stock_model("phi3", "Phi3ForCausalLM", text, original_max_position_embeddings=64)
    yield stock_model("gpt2", "GPT2LMHeadModel", text)
    yield stock_model("gpt_neo", "GPTNeoForCausalLM", text, attention_types=[[["global", "local"], 1]], window_size=8)
    yield stock_model("gpt_neox", "GPTNeoXForCausalLM", text)
    yield stock_model("gptj", "GPTJForCausalLM", text)
    yield stock_model("opt", "OPTForCausalLM", text)
    yield stock_model("bloom", "BloomForCausalLM", text)
    yield stock_model("falcon", "FalconForCausalLM", text, new_decoder_architecture=True)
    yield stock_model("falcon-multi-query-alibi", "FalconForCausalLM", text, multi_query=True, alibi=True)
    yield stock_model("starcoder2", "Starcoder2ForCausalLM", text)
    yield stock_model("olmo", "OlmoForCausalLM", text)
    yield stock_model("olmo2", "Olmo2ForCausalLM", text)
    yield stock_model("granite", "GraniteForCausalLM", text)
    yield stock_model("cohere", "CohereForCausalLM", text)
    yield stock_model("glm", "GlmForCausalLM", text)
    yield from mixture("deepseek_v2", "DeepseekV2ForCausalLM", text, **LATENT)
    yield from mixture("deepseek_v3", "DeepseekV3ForCausalLM", text, **LATENT)
    yield from mixture("gpt_oss", "GptOssForCausalLM", text)
    yield from mixture("mixtral", "MixtralForCausalLM", text)
    yield from mixture("qwen2_moe", "Qwen2MoeForCausalLM", text)
    yield from mixture("qwen3_moe", "Qwen3MoeForCausalLM", text)
    yield from mixture("olmoe", "OlmoeForCausalLM", text)
    yield stock_model("bert", "BertForMaskedLM", text)
    yield stock_model("roberta", "RobertaForMaskedLM", text)
    yield stock_model("distilbert", "DistilBertForMaskedLM", text)
    yield stock_model("albert", "AlbertForMaskedLM", text)
    yield stock_model("electra", "ElectraForMaskedLM", text)
    yield stock_model(
        "deberta_v2",
        "DebertaV2ForMaskedLM",
        text,
        relative_attention=True,
        position_buckets=8,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
    )
    yield stock_model("t5", "T5ForConditionalGeneration", text)
    yield stock_model("bart", "BartForConditionalGeneration", text)
    yield stock_model("marian", "MarianMTModel", text)
    yield stock_model("vit", "ViTForImageClassification", image)
    yield stock_model("deit", "DeiTForImageClassification", image)
    yield stock_model(
        "swin",
        "SwinForImageClassification",
        image,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=2,
        patch_size=2,
    )
    yield stock_model(
        "convnext",
        "ConvNextForImageClassification",
        image,
        hidden_sizes=[8, 16, 32, 32],
        depths=[1, 1, 2, 1],
        image_size=32,
    )
    yield stock_model("clip", "CLIPModel", pair)
    yield stock_model("siglip", "SiglipModel", pair)
    yield stock_model("whisper", "WhisperForConditionalGeneration", transcript)
    yield stock_model("wav2vec2", "Wav2Vec2ForSequenceClassification", sound, **CONVOLVED)
    yield stock_model(
        "llava",
        "LlavaForConditionalGeneration",
        image_text,
        image_token_index=63,
        image_seq_length=16,
        vision_feature_layer=-1,
        unused=("*.post_layernorm.*",),
    )
    yield scored_model(
        stock_model(
            "qwen2_5_vl-vision",
            "Qwen2_5_VisionTransformerPretrainedModel",
            patches,
            window_size=16,
            fullatt_block_indexes=[1],
        ),
        "pooler_output",
    )
    yield stock_model(
        "qwen2_5_vl-language",
        "Qwen2_5_VLForConditionalGeneration",
        text,
        unused=("model.visual.*",),
        text_config={"rope_parameters": MROPE},
    )
    yield scored_model(
        stock_model(
            "qwen3_vl-vision",
            "Qwen3VLVisionModel",
            patches,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0],
            unused=("*.deepstack*",),
        ),
        "pooler_output",
    )
    yield stock_model(
        "qwen3_vl-language",
        "Qwen3VLForConditionalGeneration",
        text,
        unused=("model.visual.*",),
        vision_config=DEEP,
        text_config={"rope_parameters": MROPE},
    )
    yield stock_model("mamba", "MambaForCausalLM", text)
    yield stock_model("rwkv", "RwkvForCausalLM", text, unrolled=True, rescale_every=0, attention_hidden_size=32)
