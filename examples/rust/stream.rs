//! Streams one completion: stream MODEL PROMPT MAX_TOKENS [CANCEL_AFTER]
//!
//!     rustc -O --edition 2021 stream.rs
//!     ./stream "" "The capital of France is" 10
//!
//! INL names the program to start instead of `inl`; CONFIG is a JSON object of
//! EngineConfig's fields.

mod inl;

use std::env;
use std::io::Write;
use std::process::ExitCode;

fn run(words: &[String]) -> Result<(), inl::Error> {
    let setting = |name: &str, otherwise: &str| env::var(name).unwrap_or(otherwise.into());
    let most: usize = words.get(4).and_then(|n| n.parse().ok()).unwrap_or(usize::MAX);
    let mut engine =
        inl::Engine::open(&words[1], &setting("CONFIG", "{}"), &setting("INL", "inl"))?;
    let mut tokens = Vec::new();
    let options = format!("\"max_tokens\": {}", words[3]);
    let done = engine.stream(&words[2], &options, |piece| {
        tokens.extend_from_slice(&piece.tokens);
        let mut out = std::io::stdout();
        let shown = write!(out, "{}", piece.text).and_then(|()| out.flush());
        shown.is_ok() && tokens.len() < most
    })?;
    let listed: String = tokens.iter().map(|token| format!(" {token}")).collect();
    let _ = writeln!(
        std::io::stdout(),
        "\n{} after {}:{listed}",
        done.finish_reason,
        done.prompt_tokens
    );
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().collect();
    if words.len() < 4 {
        eprintln!("usage: stream MODEL PROMPT MAX_TOKENS [CANCEL_AFTER]");
        return ExitCode::from(2);
    }
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
