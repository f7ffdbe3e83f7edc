//! `learner generate`: text from a model, by the engine that samples rollouts.

use std::io::Read;
use std::path::PathBuf;

use serde::Serialize;

use super::device::{self, Work};
use super::setup::{self, Text};
use super::{CliError, OutputArguments, print_json, print_text};
use crate::device::{Device, DeviceChoice, GemmLibrary};
use crate::engine::{self, BuiltinEngine, Engine, Finish, SampleKey};
use crate::text::{ChatFormat, Role, Turn};

#[derive(clap::Args)]
pub struct GenerateArguments {
    /// Hugging Face directory of the model
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What to say to it; standard input when left out
    #[arg(long)]
    prompt: Option<String>,
    /// System turn before the prompt
    #[arg(long, default_value = "")]
    system: String,
    /// Continue the prompt as bare text, without chat turns
    #[arg(long)]
    raw: bool,
    /// Tokens to generate at most
    #[arg(long, default_value_t = 256)]
    max_tokens: usize,
    /// 0 takes the most probable token
    #[arg(long, default_value_t = 1.0)]
    temperature: f32,
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Where the model runs: cpu, cuda[:N] or emulated
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: DeviceChoice,
}

#[derive(Serialize)]
struct Generated {
    text: String,
    ids: Vec<u32>,
    log_probs: Vec<f32>,
    finish: &'static str,
    prompt_ids: Vec<u32>,
}

pub fn run(arguments: &GenerateArguments, output: &OutputArguments) -> Result<(), CliError> {
    if arguments.max_tokens == 0 {
        return Err(CliError::Refused("--max-tokens 0: must be at least 1".into()));
    }
    let settings = engine::Settings { temperature: arguments.temperature.into(), ..engine::Settings::default() };
    settings.check().map_err(|_| CliError::Refused(format!("--temperature {}: must be 0 or more", arguments.temperature)))?;
    let prompt = match &arguments.prompt {
        Some(prompt) => prompt.clone(),
        None => {
            let mut prompt = String::new();
            std::io::stdin()
                .read_to_string(&mut prompt)
                .map_err(|error| CliError::Refused(format!("standard input: {error}")))?;
            prompt
        }
    };
    let text = Text::load(Some(&arguments.model))?;
    let format = text.format()?;
    let prompt_ids = if arguments.raw {
        text.tokenizer.encode_plain(&prompt)
    } else {
        let system = (!arguments.system.is_empty()).then_some(Turn { role: Role::System, content: &arguments.system });
        let turns: Vec<Turn> = system.into_iter().chain([Turn { role: Role::User, content: &prompt }]).collect();
        format.opening(&turns)
    };
    if prompt_ids.is_empty() {
        return Err(CliError::Refused("the prompt is empty".into()));
    }
    let work = Generating { arguments, settings, text: &text, format, prompt_ids, output };
    device::run_on(arguments.device, GemmLibrary::Own, work)
}

/// A generation that is about to start.
struct Generating<'a> {
    arguments: &'a GenerateArguments,
    settings: engine::Settings,
    text: &'a Text,
    format: ChatFormat<'a>,
    prompt_ids: Vec<u32>,
    output: &'a OutputArguments,
}

impl Work for Generating<'_> {
    fn on<D: Device>(self, device: D) -> Result<(), CliError> {
        generate(device, self)
    }
}

fn generate<D: Device>(device: D, generating: Generating<'_>) -> Result<(), CliError> {
    let Generating { arguments, settings, text, format, prompt_ids, output } = generating;
    let model = setup::load_model_from(device, &arguments.model, text)?;
    setup::check_length(model.config(), prompt_ids.len() + arguments.max_tokens, "prompt and --max-tokens together")?;
    let mut engine = BuiltinEngine::new(&model, settings, format.stop_token(), text.tokenizer.vocabulary_size());
    let sequence = engine.open(SampleKey { seed: arguments.seed, stream: 0, step: 0, task: 0, sample: 0 });
    engine.request_turn(sequence, &prompt_ids, arguments.max_tokens);
    let turn = loop {
        if let Some(turn) = engine.advance().map_err(CliError::failed)?.pop() {
            break turn;
        }
    };
    let spoken = match turn.finish {
        Finish::Stop => &turn.ids[..turn.ids.len() - 1],
        Finish::Length => &turn.ids[..],
    };
    let generated = Generated {
        text: text.tokenizer.decode(spoken),
        log_probs: turn.log_probs.clone(),
        finish: if turn.finish == Finish::Stop { "stop" } else { "length" },
        prompt_ids,
        ids: turn.ids.clone(),
    };
    if output.json {
        return print_json(&generated);
    }
    print_text(&format!("{}\n", generated.text))
}
