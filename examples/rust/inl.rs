//! Client of INL's caller protocol, version 1 (docs/callers.md): std only.

use std::fmt;
use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

pub const VERSION: u32 = 1;
const MAX_BYTES: u32 = 1 << 26;

const HELLO: u16 = 1;
const OPEN: u16 = 2;
const READY: u16 = 3;
const REQUEST: u16 = 4;
const TOKENS: u16 = 5;
const DONE: u16 = 6;
const CANCEL: u16 = 7;
const ERROR: u16 = 8;
const CLOSE: u16 = 9;

/// A sentence: of INL, or on its process or connection.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        write!(out, "inl: {}", self.0)
    }
}

impl std::error::Error for Error {}

fn fail<T>(sentence: impl Into<String>) -> Result<T, Error> {
    Err(Error(sentence.into()))
}

/// One piece of a stream: tokens and the text that they complete.
pub struct Piece {
    pub tokens: Vec<i32>,
    pub text: String,
}

pub struct Done {
    pub prompt_tokens: u32,
    /// "stop", "length", "cancelled" or "deadline".
    pub finish_reason: String,
}

struct Frame {
    kind: u16,
    payload: Vec<u8>,
}

/// A process `inl pipe` with one open model; one stream at a time.
pub struct Engine {
    child: Child,
    to: Option<ChildStdin>,
    from: ChildStdout,
    last: u32,
    pub context: u32,
    pub device: String,
}

impl Engine {
    /// model: a folder or GGUF file; "" is the default model. config: a JSON object of
    /// EngineConfig's fields. program: the `inl` to start.
    pub fn open(model: &str, config: &str, program: &str) -> Result<Engine, Error> {
        let mut child = Command::new(program)
            .arg("pipe")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| Error(format!("{program} could not be started: {error}")))?;
        let to = child.stdin.take();
        let from = child.stdout.take().expect("stdout is piped");
        let device = String::new();
        let mut engine = Engine { child, to, from, last: 0, context: 0, device };
        engine.send(HELLO, &VERSION.to_le_bytes())?;
        let version = get32(&engine.expect(HELLO)?, 0)?;
        if version != VERSION {
            return fail(format!(
                "found protocol version {version}, this client has {VERSION}"
            ));
        }
        let name = if model.is_empty() { "null".into() } else { quote(model) };
        let json = format!("{{\"model\": {name}, \"config\": {config}}}");
        engine.send(OPEN, json.as_bytes())?;
        let ready = engine.expect(READY)?;
        engine.context = get32(&ready, 0)?;
        engine.device = text(&ready[4..]);
        Ok(engine)
    }

    /// Streams one completion. options: the inside of a JSON object, such as
    /// `"max_tokens": 20`; `on_piece` returns false to cancel.
    pub fn stream(
        &mut self,
        prompt: &str,
        options: &str,
        mut on_piece: impl FnMut(&Piece) -> bool,
    ) -> Result<Done, Error> {
        self.last += 1;
        let number = self.last;
        let comma = if options.is_empty() { "" } else { ", " };
        let json = format!("{{\"prompt\": {}{comma}{options}}}", quote(prompt));
        let mut payload = number.to_le_bytes().to_vec();
        payload.extend_from_slice(json.as_bytes());
        self.send(REQUEST, &payload)?;
        let mut cancelled = false;
        loop {
            let Frame { kind, payload } = self.receive()?;
            if get32(&payload, 0)? != number {
                return fail("found a frame of another request");
            }
            if kind == DONE {
                let prompt_tokens = get32(&payload, 4)?;
                return Ok(Done { prompt_tokens, finish_reason: text(&payload[8..]) });
            }
            if kind != TOKENS {
                return fail(format!("found frame kind {kind} in a stream"));
            }
            let count = get32(&payload, 4)? as usize;
            let mut tokens = Vec::new();
            for index in 0..count {
                tokens.push(get32(&payload, 8 + 4 * index)? as i32);
            }
            let piece = Piece { tokens, text: text(&payload[8 + 4 * count..]) };
            if !cancelled && !on_piece(&piece) {
                self.send(CANCEL, &number.to_le_bytes())?;
                cancelled = true;
            }
        }
    }

    fn send(&mut self, kind: u16, payload: &[u8]) -> Result<(), Error> {
        let mut data = b"IC".to_vec();
        data.extend_from_slice(&kind.to_le_bytes());
        data.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        data.extend_from_slice(payload);
        let sent = match &mut self.to {
            Some(to) => to.write_all(&data).and_then(|_| to.flush()).is_ok(),
            None => false,
        };
        if sent { Ok(()) } else { fail(self.stop()) }
    }

    fn take(&mut self, size: usize) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; size];
        match self.from.read_exact(&mut data) {
            Ok(()) => Ok(data),
            Err(_) => fail(self.stop()),
        }
    }

    /// An ERROR is returned as INL's own sentence.
    fn receive(&mut self) -> Result<Frame, Error> {
        let head = self.take(8)?;
        if &head[..2] != b"IC" {
            return fail("found bytes that are not a frame; something else writes there");
        }
        let size = get32(&head, 4)?;
        if size > MAX_BYTES {
            return fail(format!("found a payload of {size} bytes"));
        }
        let kind = u16::from_le_bytes([head[2], head[3]]);
        let payload = self.take(size as usize)?;
        if kind == ERROR && payload.len() >= 4 {
            return fail(text(&payload[4..]));
        }
        Ok(Frame { kind, payload })
    }

    fn expect(&mut self, kind: u16) -> Result<Vec<u8>, Error> {
        let frame = self.receive()?;
        if frame.kind != kind {
            return fail(format!("found frame kind {}, accepted: {kind}", frame.kind));
        }
        Ok(frame.payload)
    }

    /// Closes the pipe, waits for the process and says how it ended.
    fn stop(&mut self) -> String {
        self.to = None;
        match self.child.wait() {
            Ok(status) => format!("the process {}", ending(status)),
            Err(error) => format!("the process is lost: {error}"),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.send(CLOSE, b"");
        self.stop();
    }
}

#[cfg(unix)]
fn ending(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match status.signal() {
        Some(signal) => format!("was ended by signal {signal}"),
        None => format!("ended with status {}", status.code().unwrap_or(-1)),
    }
}

#[cfg(not(unix))]
fn ending(status: ExitStatus) -> String {
    format!("ended with status {}", status.code().unwrap_or(-1))
}

fn get32(bytes: &[u8], at: usize) -> Result<u32, Error> {
    match bytes.get(at..at + 4) {
        Some(four) => Ok(u32::from_le_bytes([four[0], four[1], four[2], four[3]])),
        None => fail("a payload ends too early"),
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A JSON string literal.
pub fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if (c as u32) < 0x20 => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out + "\""
}
