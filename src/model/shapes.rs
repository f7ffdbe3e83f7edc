//! The shapes of the published Qwen2.5 and Qwen3 dense models, for work that needs a shape and no weights: benchmarks and plans.
//!
//! `tiny` is the shape that the quick start trains. From the models' own `config.json`. What differs within a family beside these columns does not: `rms_norm_eps` 1e-6,
//! `rope_theta` 1,000,000, and the longest sequence without scaled rotary embeddings.

use serde_json::Map;

use super::config::{Family, ModelConfig};

/// Name, family, `[hidden, intermediate, layers, query heads, key/value heads, head_dim, vocabulary]`, tied embeddings.
#[rustfmt::skip]
const SHAPES: &[(&str, Family, [usize; 7], bool)] = &[
    ("tiny",         Family::Qwen3, [128,    384,  2,  4, 2,  32,     440], true),
    ("qwen2.5-0.5b", Family::Qwen2, [896,  4_864, 24, 14, 2,  64, 151_936], true),
    ("qwen2.5-1.5b", Family::Qwen2, [1536,  8_960, 28, 12, 2, 128, 151_936], true),
    ("qwen2.5-7b",   Family::Qwen2, [3584, 18_944, 28, 28, 4, 128, 152_064], false),
    ("qwen2.5-14b",  Family::Qwen2, [5120, 13_824, 48, 40, 8, 128, 152_064], false),
    ("qwen2.5-32b",  Family::Qwen2, [5120, 27_648, 64, 40, 8, 128, 152_064], false),
    ("qwen2.5-72b",  Family::Qwen2, [8192, 29_568, 80, 64, 8, 128, 152_064], false),
    ("qwen3-0.6b",   Family::Qwen3, [1024,  3_072, 28, 16, 8, 128, 151_936], true),
    ("qwen3-1.7b",   Family::Qwen3, [2048,  6_144, 28, 16, 8, 128, 151_936], true),
    ("qwen3-4b",     Family::Qwen3, [2560,  9_728, 36, 32, 8, 128, 151_936], true),
    ("qwen3-8b",     Family::Qwen3, [4096, 12_288, 36, 32, 8, 128, 151_936], false),
    ("qwen3-14b",    Family::Qwen3, [5120, 17_408, 40, 40, 8, 128, 151_936], false),
    ("qwen3-32b",    Family::Qwen3, [5120, 25_600, 64, 64, 8, 128, 151_936], false),
];

/// Names of all shapes, each family in order of size.
pub fn shape_names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|(name, ..)| *name)
}

impl ModelConfig {
    /// The configuration of a published model, by a name of [`shape_names`].
    pub fn named(name: &str) -> Option<ModelConfig> {
        let &(_, family, sizes, tied_embeddings) = SHAPES.iter().find(|(known, ..)| *known == name)?;
        let [hidden, intermediate, layers, query_heads, key_value_heads, head_dim, vocabulary] = sizes;
        Some(ModelConfig {
            family,
            vocabulary,
            hidden,
            intermediate,
            layers,
            query_heads,
            key_value_heads,
            head_dim,
            norm_epsilon: 1e-6,
            rope_theta: 1e6,
            yarn: None,
            max_positions: if family == Family::Qwen2 { 32_768 } else { 40_960 },
            tied_embeddings,
            attention_bias: family == Family::Qwen2,
            other: Map::new(),
        })
    }

    /// Parameters of a model of this shape; a tied embedding counts once.
    pub fn parameter_count(&self) -> usize {
        super::parameters::Layout::new(self).parameter_count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The totals that the models' safetensors files hold (Qwen3's tied ones also store their head once more, not counted here).
    #[test]
    fn shapes_have_the_published_numbers_of_parameters() {
        let published = [
            ("tiny", 450_304),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-14b", 14_768_307_200),
            ("qwen3-32b", 32_762_123_264),
        ];
        assert_eq!(shape_names().collect::<Vec<_>>(), published.map(|(name, _)| name));
        for (name, parameters) in published {
            assert_eq!(ModelConfig::named(name).map(|config| config.parameter_count()), Some(parameters), "{name}");
        }
    }

    #[test]
    fn shapes_are_read_back_from_their_own_files() {
        for config in shape_names().filter_map(ModelConfig::named) {
            let read = ModelConfig::from_json(&config.to_json()).expect("a configuration reads back");
            assert_eq!(ModelConfig { other: Map::new(), ..read }, config);
        }
    }
}
