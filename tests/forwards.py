"""The families of tiny models with which our own forward is tested."""

KINDS = (
    *(
        "llama",
        "llama-biased",
        "llama-tied",
        "llama-long",
        "mistral",
        "qwen2",
        "qwen3",
        "mistral-sliding",
        "olmo2",
    ),
    *(
        "qwen3-short",
        "gemma3-short",
        "olmo3-short",
        "phi3-short",
        "smollm3-short",
        "granite-scaled",
    ),
    *("qwen3-moe", "mixtral", "gemma2-short", "gpt-oss", "phi4-mini", "glm", "glm4"),
)
