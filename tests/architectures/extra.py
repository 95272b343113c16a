"""Other architectures, as different as possible, which are tested at night."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.architectures.architecture import LENGTH, Architecture, mixture, scored_model, stock_model
from tests.architectures.batches import (
    filterbank,
    forecast,
    image,
    series,
    sound,
    spectrogram,
    speech,
    text,
    trajectory,
    video,
    whole_text,
)
from tests.architectures.configs import CONVOLVED, LATENT

_CHUNKED = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8}


_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}


_LINEAR = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


_STAGES = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 32}


def extra() -> Iterator[Architecture]:
    """Other architectures, as different as possible."""
    decoders: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "stablelm": ("StableLmForCausalLM", {}),
        "persimmon": ("PersimmonForCausalLM", {}),
        "nemotron": ("NemotronForCausalLM", {}),
        "exaone4": ("Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window_pattern": 2}),
        "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4}),
        "ernie4_5": ("Ernie4_5ForCausalLM", {}),
        "helium": ("HeliumForCausalLM", {}),
        "glm4": ("Glm4ForCausalLM", {}),
        "cohere2": ("Cohere2ForCausalLM", {"num_hidden_layers": 4}),
        "olmo3": ("Olmo3ForCausalLM", {"num_hidden_layers": 4}),
        "apertus": ("ApertusForCausalLM", {}),
        "arcee": ("ArceeForCausalLM", {}),
        "nanochat": ("NanoChatForCausalLM", {}),
        "seed_oss": ("SeedOssForCausalLM", {}),
        "diffllama": ("DiffLlamaForCausalLM", {}),
        "xglm": ("XGLMForCausalLM", {"dtype": torch.float32}),
        "biogpt": ("BioGptForCausalLM", {}),
        "codegen": ("CodeGenForCausalLM", {}),
        "mpt": ("MptForCausalLM", {}),
        "gpt_bigcode": ("GPTBigCodeForCausalLM", {}),
        "ctrl": ("CTRLLMHeadModel", {}),
        "openai-gpt": ("OpenAIGPTLMHeadModel", {}),
        "xlnet": ("XLNetLMHeadModel", {"unused": ("*.mask_emb", "*.r_s_bias", "*.seg_embed")}),
        "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
        "falcon_mamba": ("FalconMambaForCausalLM", {}),
        "mamba2": ("Mamba2ForCausalLM", _CHUNKED),
        "bamba": ("BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1]}),
        "zamba2": (
            "Zamba2ForCausalLM",
            {
                "layers_block_type": ["linear_attention", "hybrid"],
                "n_mamba_heads": 4,
                "chunk_size": 8,
                "attention_head_dim": 16,
                "adapter_rank": 4,
            },
        ),
        "recurrent_gemma": ("RecurrentGemmaForCausalLM", {"unrolled": True, "num_hidden_layers": 3, "lru_width": 32}),
        "longformer": ("LongformerForMaskedLM", {"unused": ("*_global.*",), "attention_window": 4}),
        "big_bird": ("BigBirdForMaskedLM", {"unused": ("*.pooler.*",), "attention_type": "original_full"}),
        "funnel": ("FunnelForMaskedLM", {"block_sizes": [1, 1]}),
        "mpnet": ("MPNetForMaskedLM", {}),
        "camembert": ("CamembertForMaskedLM", {}),
        "xlm_roberta": ("XLMRobertaForMaskedLM", {}),
        "ernie": ("ErnieForMaskedLM", {}),
        "modernbert": ("ModernBertForMaskedLM", {"num_hidden_layers": 4, "local_attention": 8}),
        "convbert": ("ConvBertForMaskedLM", {}),
        "squeezebert": ("SqueezeBertForMaskedLM", {"unused": ("*.pooler.*",)}),
        "nystromformer": (
            "NystromformerForMaskedLM",
            {"segment_means_seq_len": 16, "num_landmarks": 4, "conv_kernel_size": 5},
        ),
        "roformer": ("RoFormerForMaskedLM", {}),
        "rembert": ("RemBertForMaskedLM", {"input_embedding_size": 16, "output_embedding_size": 32}),
        "deberta": ("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
        "mobilebert": (
            "MobileBertForMaskedLM",
            {"embedding_size": 16, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        ),
        "fnet": ("FNetForMaskedLM", {"unused": ("*.pooler.*",)}),
        "esm": ("EsmForMaskedLM", {"unused": ("*.contact_head.*",), "position_embedding_type": "rotary"}),
        "layoutlm": ("LayoutLMForMaskedLM", {"unused": ("*.pooler.*",)}),
        "pegasus": ("PegasusForConditionalGeneration", {}),
        "mbart": ("MBartForConditionalGeneration", {}),
        "blenderbot": ("BlenderbotForConditionalGeneration", {}),
        "led": ("LEDForConditionalGeneration", {"unused": ("*_global.*",), "attention_window": 4}),
        "longt5": ("LongT5ForConditionalGeneration", {"local_radius": 4}),
        "umt5": ("UMT5ForConditionalGeneration", {}),
        "prophetnet": ("ProphetNetForConditionalGeneration", {}),
        "m2m_100": ("M2M100ForConditionalGeneration", {}),
    }
    for name, (stock, own) in decoders.items():
        yield stock_model(name, stock, text, **own)
    yield from mixture("granitemoe", "GraniteMoeForCausalLM", text)
    yield from mixture("phimoe", "PhimoeForCausalLM", text, router_jitter_noise=0.0)
    yield from mixture("jamba", "JambaForCausalLM", text, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1)
    yield from mixture("glm4_moe", "Glm4MoeForCausalLM", text, **{**LATENT, "num_key_value_heads": 2})
    yield from mixture("qwen3_next", "Qwen3NextForCausalLM", text, **_LINEAR)
    vision: Mapping[str, tuple[str, Mapping[str, Any]]] = {
        "beit": ("BeitForImageClassification", {"use_relative_position_bias": True}),
        "dinov2": ("Dinov2ForImageClassification", {"unused": ("*.mask_token",)}),
        "ijepa": ("IJepaForImageClassification", {}),
        "convnextv2": ("ConvNextV2ForImageClassification", _STAGES),
        "resnet": ("ResNetForImageClassification", {**_STAGES, "embedding_size": 8}),
        "regnet": ("RegNetForImageClassification", {**_STAGES, "embedding_size": 8, "groups_width": 8}),
        "bit": ("BitForImageClassification", {**_STAGES, "embedding_size": 8, "num_groups": 2}),
        "mobilenet_v2": ("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}),
        "efficientnet": (
            "EfficientNetForImageClassification",
            {"width_coefficient": 0.25, "depth_coefficient": 0.2, "image_size": 32, "hidden_dim": 320},
        ),
        "segformer": ("SegformerForImageClassification", {**_STAGES, "num_attention_heads": [1, 2, 4, 4]}),
        "pvt": (
            "PvtForImageClassification",
            {
                **_STAGES,
                "image_size": 64,
                "sequence_reduction_ratios": [4, 2, 1, 1],
                "num_attention_heads": [1, 2, 4, 4],
            },
        ),
        "pvt_v2": (
            "PvtV2ForImageClassification",
            {**_STAGES, "image_size": 64, "sr_ratios": [4, 2, 1, 1], "num_attention_heads": [1, 2, 4, 4]},
        ),
        "levit": (
            "LevitForImageClassification",
            {
                "patch_size": 16,
                "hidden_sizes": [16, 32, 32],
                "num_attention_heads": [2, 4, 4],
                "depths": [1, 1, 1],
                "key_dim": [8, 8, 8],
                "image_size": 64,
            },
        ),
        "mobilevit": (
            "MobileViTForImageClassification",
            {"hidden_sizes": [16, 32, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 32, 32], "image_size": 64},
        ),
        "poolformer": ("PoolFormerForImageClassification", _STAGES),
        "cvt": (
            "CvtForImageClassification",
            {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3], "image_size": 32},
        ),
        "focalnet": ("FocalNetForImageClassification", {"embed_dim": 8, "depths": [1, 1, 1, 1], "image_size": 32}),
        "swinv2": (
            "Swinv2ForImageClassification",
            {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "patch_size": 2},
        ),
        "swiftformer": (
            "SwiftFormerForImageClassification",
            {"embed_dims": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "image_size": 64},
        ),
        "hiera": (
            "HieraForImageClassification",
            {
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 2, 4, 8],
                "image_size": [64, 64],
                "masked_unit_size": [8, 8],
            },
        ),
    }
    for name, (stock, own) in vision.items():
        yield stock_model(name, stock, image, **own)
    yield stock_model("videomae", "VideoMAEForVideoClassification", video, num_frames=4)
    yield stock_model("timesformer", "TimesformerForVideoClassification", video, num_frames=4)
    yield stock_model("vivit", "VivitForVideoClassification", video, num_frames=4, tubelet_size=[2, 4, 4])
    yield stock_model("wav2vec2-ctc", "Wav2Vec2ForCTC", speech, **CONVOLVED)
    for name, stock in {
        "hubert": "Hubert",
        "wavlm": "WavLM",
        "unispeech": "UniSpeech",
        "sew": "SEW",
        "data2vec_audio": "Data2VecAudio",
        "wav2vec2_conformer": "Wav2Vec2Conformer",
    }.items():
        unused = ("*.pos_conv_embed.*",) if "conformer" in name else ()
        own = {**CONVOLVED, "max_source_positions": 128}
        yield stock_model(name, f"{stock}ForSequenceClassification", sound, **own, unused=unused)
    yield stock_model(
        "audio_spectrogram_transformer",
        "ASTForAudioClassification",
        spectrogram,
        max_length=16,
        frequency_stride=4,
        time_stride=4,
    )
    yield stock_model(
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        filterbank,
        conv_channels=32,
        input_feat_per_channel=8,
        max_source_positions=64,
    )
    yield stock_model(
        "patchtst",
        "PatchTSTForPrediction",
        series,
        context_length=32,
        prediction_length=8,
        num_input_channels=4,
        patch_length=4,
        patch_stride=4,
    )
    yield stock_model(
        "patchtsmixer",
        "PatchTSMixerForPrediction",
        series,
        context_length=32,
        prediction_length=8,
        num_input_channels=4,
    )
    yield stock_model(
        "time_series_transformer",
        "TimeSeriesTransformerForPrediction",
        forecast,
        context_length=16,
        prediction_length=8,
        num_time_features=2,
    )
    yield stock_model(
        "autoformer",
        "AutoformerForPrediction",
        forecast,
        dtype=torch.float32,
        refused={"train": "a size depends on the values of a tensor"},
        context_length=16,
        prediction_length=8,
        num_time_features=2,
        label_length=4,
        moving_average=5,
    )
    yield scored_model(
        stock_model(
            "decision_transformer",
            "DecisionTransformerModel",
            trajectory,
            unused=("*.wte.*", "*.predict_state.*", "*.predict_return.*"),
        ),
        "action_preds",
    )
    yield scored_model(
        stock_model("dinov3_vit", "DINOv3ViTModel", image, pos_embed_rescale=None, unused=("*.mask_token",)),
        "pooler_output",
    )
    yield stock_model(
        "perceiver",
        "PerceiverForMaskedLM",
        whole_text,
        max_position_embeddings=LENGTH,
        num_latents=8,
        d_latents=32,
        num_self_attends_per_block=2,
        num_self_attention_heads=4,
        num_cross_attention_heads=4,
        qk_channels=32,
        v_channels=32,
    )
