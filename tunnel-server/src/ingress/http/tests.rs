mod bench;
mod framing;
mod hangup;
mod moves;
mod reuse;
mod silence;
mod trailers;
mod upgrade;
