//! `config.json` of a Qwen2, Qwen2.5 or Qwen3 dense model, as Hugging Face Transformers writes it.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::error::ModelError;
use super::rope::{RopeSettings, RopeType, Yarn};
use crate::device::{Device, Heads, ModelSizes};

/// The two families: they differ in attention biases (Qwen2) and in the norm of queries and keys (Qwen3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Qwen2,
    Qwen3,
}

impl Family {
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }
    fn architecture(self) -> &'static str {
        match self {
            Family::Qwen2 => "Qwen2ForCausalLM",
            Family::Qwen3 => "Qwen3ForCausalLM",
        }
    }
}

/// The shape of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    pub vocabulary: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub query_heads: usize,
    pub key_value_heads: usize,
    pub head_dim: usize,
    pub norm_epsilon: f32,
    pub rope_theta: f64,
    /// Rotary embeddings scaled for longer sequences than the model was trained on.
    pub yarn: Option<Yarn>,
    /// Longest sequence the model was made for, in tokens; with the scaling, if there is one.
    pub max_positions: usize,
    /// The head reads the embedding table.
    pub tied_embeddings: bool,
    /// Queries, keys and values have biases.
    pub attention_bias: bool,
    /// Every other field of the file, kept so that a saved model can be served by others (`eos_token_id` and the like).
    pub other: Map<String, Value>,
}

impl ModelConfig {
    /// Each query head and each key head is normed (Qwen3).
    pub fn query_key_norms(&self) -> bool {
        self.family == Family::Qwen3
    }

    /// Whether a device can run this model.
    ///
    /// # Errors
    /// One line naming the field that it cannot.
    pub fn check_on<D: Device>(&self, device: &D) -> Result<(), String> {
        device.check_sizes(ModelSizes {
            heads: self.heads(),
            hidden: self.hidden,
            intermediate: self.intermediate,
            vocabulary: self.vocabulary,
        })
    }

    pub fn heads(&self) -> Heads {
        Heads { query_heads: self.query_heads, key_value_heads: self.key_value_heads, head_dim: self.head_dim }
    }

    /// Reads `directory/config.json`.
    ///
    /// # Errors
    /// One line naming the file and the field, for anything that this program does not run: another model type, rotary embeddings scaled
    /// in another way than YaRN's, a sliding window in use, experts, impossible sizes.
    pub fn load(directory: &Path) -> Result<ModelConfig, ModelError> {
        let path = directory.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(|source| ModelError::io(&path, source))?;
        ModelConfig::from_json(&text).map_err(|problem| ModelError::Config { path, problem })
    }

    /// The same, for a model that `device` is to run.
    ///
    /// # Errors
    /// Also what the device cannot run: see [`ModelConfig::check_on`].
    pub(crate) fn load_for<D: Device>(device: &D, directory: &Path) -> Result<ModelConfig, ModelError> {
        let config = ModelConfig::load(directory)?;
        let path = directory.join("config.json");
        config.check_on(device).map_err(|problem| ModelError::Config { path, problem })?;
        Ok(config)
    }

    /// Reads the text of a `config.json`; the error is one line without the file's name.
    pub fn from_json(text: &str) -> Result<ModelConfig, String> {
        let value: Value = serde_json::from_str(text).map_err(|error| format!("not valid JSON: {error}"))?;
        let Value::Object(other) = value else { return Err("not a JSON object".to_string()) };
        let mut fields = Fields(other);
        let family = match fields.0.remove("model_type").as_ref().and_then(Value::as_str) {
            Some("qwen2") => Family::Qwen2,
            Some("qwen3") => Family::Qwen3,
            Some(found) => {
                return Err(format!("model_type is {found:?}, but only \"qwen2\" and \"qwen3\" (dense) are supported"));
            }
            None => return Err("model_type is missing; expected \"qwen2\" or \"qwen3\"".to_string()),
        };
        fields.refuse_unsupported()?;
        let (rope_theta, rope) = fields.rope()?;
        let hidden = fields.size("hidden_size")?;
        let query_heads = fields.size("num_attention_heads")?;
        let head_dim = match fields.optional_size("head_dim")? {
            Some(head_dim) => head_dim,
            None if hidden % query_heads == 0 => hidden / query_heads,
            None => {
                return Err(format!("hidden_size {hidden} is no multiple of num_attention_heads {query_heads}; give head_dim"));
            }
        };
        let key_value_heads = fields.optional_size("num_key_value_heads")?.unwrap_or(query_heads);
        if query_heads % key_value_heads != 0 {
            return Err(format!("num_attention_heads {query_heads} is no multiple of num_key_value_heads {key_value_heads}"));
        }
        if head_dim % 2 != 0 {
            return Err(format!("head_dim is {head_dim}, but rotary embeddings need an even number"));
        }
        let config = ModelConfig {
            family,
            vocabulary: fields.size("vocab_size")?,
            hidden,
            intermediate: fields.size("intermediate_size")?,
            layers: fields.size("num_hidden_layers")?,
            query_heads,
            key_value_heads,
            head_dim,
            norm_epsilon: fields.number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta,
            yarn: None,
            max_positions: fields.optional_size("max_position_embeddings")?.unwrap_or(32_768),
            tied_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(false),
            attention_bias: fields.flag("attention_bias")?.unwrap_or(family == Family::Qwen2),
            other: fields.0,
        };
        match rope {
            Some((name, rope)) => config.with_rope(&rope).map_err(|problem| format!("{name}.{problem}")),
            None => Ok(config),
        }
    }

    /// The same model with rotary embeddings scaled so, or not at all, whatever they are now.
    ///
    /// # Errors
    /// Names the first setting that makes no sense.
    pub fn with_rope(&self, rope: &RopeSettings) -> Result<ModelConfig, String> {
        rope.check().map_err(|errors| errors.to_string().replace('\n', "; "))?;
        let now = self.yarn.as_ref().map_or(self.max_positions, |yarn| yarn.original_length);
        let original_length = rope.original_max_position_embeddings.unwrap_or(now);
        let yarn = (rope.rope_type == RopeType::Yarn).then_some(Yarn {
            factor: rope.factor,
            original_length,
            beta_fast: rope.beta_fast,
            beta_slow: rope.beta_slow,
            attention_factor: rope.attention_factor,
        });
        let max_positions = yarn.as_ref().map_or(original_length, Yarn::length);
        Ok(ModelConfig { yarn, max_positions, ..self.clone() })
    }

    /// The file that [`ModelConfig::load`] reads back; weights are saved as f32 beside it.
    pub fn to_json(&self) -> String {
        let mut fields = self.other.clone();
        let own = json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.query_heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": shortest(self.norm_epsilon),
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": self.attention_bias,
            "torch_dtype": "float32",
        });
        fields.remove("dtype");
        if let Some(yarn) = &self.yarn {
            // Both spellings: readers of older and of newer files each know one.
            let mut parameters = json!({
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_length,
                "beta_fast": yarn.beta_fast,
                "beta_slow": yarn.beta_slow,
            });
            if let Some(factor) = yarn.attention_factor {
                parameters["attention_factor"] = factor.into();
            }
            fields.insert("rope_scaling".into(), parameters.clone());
            parameters["rope_theta"] = self.rope_theta.into();
            fields.insert("rope_parameters".into(), parameters);
        }
        if let Value::Object(own) = own {
            fields.extend(own);
        }
        let mut text = format!("{:#}", Value::Object(fields));
        text.push('\n');
        text
    }
}

/// An f32 as the shortest decimal that reads back as itself: `1e-6`, not `9.999999974752427e-7`.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(value as f64)
}

/// The fields not yet read; reading one removes it, so that what remains is what the model does not interpret.
struct Fields(Map<String, Value>);

/// How embeddings are scaled, and the field that says so.
type NamedScaling = (&'static str, RopeSettings);

impl Fields {
    fn size(&mut self, name: &str) -> Result<usize, String> {
        self.optional_size(name)?.ok_or_else(|| format!("{name} is missing"))
    }

    fn optional_size(&mut self, name: &str) -> Result<Option<usize>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(size @ 1..=0xffff_ffff) => Ok(Some(size as usize)),
                _ => Err(format!("{name} is {value}, expected a positive integer")),
            },
        }
    }

    fn number(&mut self, name: &str) -> Result<Option<f64>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64() {
                Some(number) if number.is_finite() && number > 0.0 => Ok(Some(number)),
                _ => Err(format!("{name} is {value}, expected a positive number")),
            },
        }
    }

    fn flag(&mut self, name: &str) -> Result<Option<bool>, String> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(value) => Err(format!("{name} is {value}, expected true or false")),
        }
    }

    /// `rope_theta` at the top (older files) or under `rope_parameters` (newer ones), and how embeddings are scaled, with the name of
    /// the field that says so: `rope_parameters`, or `rope_scaling` in older files.
    fn rope(&mut self) -> Result<(f64, Option<NamedScaling>), String> {
        let mut theta = self.number("rope_theta")?;
        let mut rope = None;
        for name in ["rope_scaling", "rope_parameters"] {
            let Some(Value::Object(parameters)) = self.0.remove(name) else { continue };
            let mut parameters = Fields(parameters);
            theta = theta.or(parameters.number("rope_theta").map_err(|problem| format!("{name}.{problem}"))?);
            let found = parameters.rope_settings().map_err(|problem| format!("{name} {problem}"))?;
            match &rope {
                Some((earlier, other)) if *other != found => {
                    return Err(format!("{earlier} and {name} contradict each other; leave one out"));
                }
                _ => rope = Some((name, found)),
            }
        }
        Ok((theta.unwrap_or(10_000.0), rope.filter(|(_, rope)| rope.rope_type == RopeType::Yarn)))
    }

    /// Reads all fields as those of one scaling.
    fn rope_settings(&mut self) -> Result<RopeSettings, String> {
        self.0.retain(|_, value| !value.is_null());
        let older = self.0.remove("type");
        let kind = self.0.remove("rope_type").or(older).unwrap_or_else(|| "default".into());
        if kind == "default" {
            return Ok(RopeSettings::default());
        }
        if kind != "yarn" {
            return Err(format!("has type {kind}, but only \"default\" (not scaled) and \"yarn\" are supported"));
        }
        for needed in ["factor", "original_max_position_embeddings"] {
            if !self.0.contains_key(needed) {
                return Err(format!("is of type \"yarn\" and lacks {needed}"));
            }
        }
        // Rounding the ends of the ramp outward is what this flag asks for.
        if self.0.get("truncate") == Some(&Value::Bool(true)) {
            self.0.remove("truncate");
        }
        self.0.insert("rope_type".into(), kind);
        serde_json::from_value(Value::Object(self.0.clone())).map_err(|error| format!("is not understood: {error}"))
    }

    fn refuse_unsupported(&mut self) -> Result<(), String> {
        if self.flag("use_sliding_window")?.unwrap_or(false)
            && self.0.get("sliding_window").is_some_and(|window| !window.is_null())
        {
            return Err("use_sliding_window is true, but only full attention is supported".to_string());
        }
        if let Some(Value::Array(kinds)) = self.0.get("layer_types")
            && let Some(kind) = kinds.iter().find(|kind| *kind != "full_attention")
        {
            return Err(format!("layer_types holds {kind}, but only \"full_attention\" is supported"));
        }
        for name in ["num_experts", "num_local_experts", "n_routed_experts"] {
            if self.0.get(name).and_then(Value::as_u64).is_some_and(|experts| experts > 0) {
                return Err(format!("{name} is set, but mixtures of experts are not supported"));
            }
        }
        match self.0.remove("hidden_act") {
            Some(Value::String(activation)) if activation != "silu" => {
                Err(format!("hidden_act is {activation:?}, but only \"silu\" is supported"))
            }
            _ => Ok(()),
        }
    }
}
