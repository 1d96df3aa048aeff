//! Fuzzing on a stable compiler: a decoder receives a corpus that a seeded generator mutates, so
//! that a failure is reproducible.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use anyhow::{Context, Result};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use crate::gear::Gear;

/// Maximum number of changes to one input.
const CHANGES_MOST: u32 = 6;
/// Bytes at which lengths and counts are often wrong, and the pointer of a compressed name.
const EDGES: [u8; 9] = [0, 1, 0x7f, 0x80, 0xff, 0xfe, 0xc0, b'\n', b'.'];

/// Runs `target` on the corpus, and then on as many mutations of it as the run's gear has, each at
/// most `longest` bytes.
///
/// # Errors
/// Returns the error of `target` with the input as hexadecimal.
///
/// # Panics
/// Panics if `target` does. The input is printed as hexadecimal.
pub fn fuzz(
    corpus: &[Vec<u8>],
    seed: u64,
    longest: usize,
    target: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let executions = Gear::current().pick(20_000, 5_000_000);
    fuzz_times(executions, corpus, seed, longest, target)
}

fn fuzz_times(
    executions: u32,
    corpus: &[Vec<u8>],
    seed: u64,
    longest: usize,
    mut target: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    for input in corpus {
        target(input).with_context(|| shown(seed, input))?;
    }
    let mut random = SmallRng::seed_from_u64(seed);
    let mut input = Vec::new();
    for _ in 0..executions {
        next(&mut random, corpus, longest, &mut input);
        match catch_unwind(AssertUnwindSafe(|| target(&input))) {
            Ok(checked) => checked.with_context(|| shown(seed, &input))?,
            Err(panic) => {
                let line = format!("{}\n", shown(seed, &input));
                let _nowhere = std::io::stderr().write_all(line.as_bytes());
                resume_unwind(panic);
            }
        }
    }
    Ok(())
}

fn shown(seed: u64, input: &[u8]) -> String {
    let bytes: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("seed {seed}, input {bytes}")
}

/// Creates the next input: mostly one of the corpus with a few changes, sometimes noise.
fn next(random: &mut SmallRng, corpus: &[Vec<u8>], longest: usize, input: &mut Vec<u8>) {
    input.clear();
    if corpus.is_empty() || random.random_range(0..10) == 0 {
        let length = random.random_range(0..=longest.min(64));
        input.extend((0..length).map(|_| random.random::<u8>()));
        return;
    }
    input.extend_from_slice(&corpus[random.random_range(0..corpus.len())]);
    for _ in 0..random.random_range(1..=CHANGES_MOST) {
        change(random, corpus, input);
    }
    input.truncate(longest);
}

fn change(random: &mut SmallRng, corpus: &[Vec<u8>], input: &mut Vec<u8>) {
    let offset = random.random_range(0..=input.len());
    let end = (offset + random.random_range(1..=16)).min(input.len());
    match random.random_range(0..8) {
        0 if offset < input.len() => input[offset] ^= 1 << random.random_range(0..8),
        1 if offset < input.len() => input[offset] = random.random(),
        2 if offset < input.len() => input[offset] = EDGES[random.random_range(0..EDGES.len())],
        3 => input.insert(offset, random.random()),
        4 => drop(input.drain(offset..end)),
        5 => {
            let again = input[offset..end].to_vec();
            let times = random.random_range(1..=4);
            for _ in 0..times {
                input.splice(offset..offset, again.iter().copied());
            }
        }
        6 => input.truncate(offset),
        _ => {
            let other = &corpus[random.random_range(0..corpus.len())];
            let from = random.random_range(0..=other.len());
            input.truncate(offset);
            input.extend_from_slice(&other[from..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_gives_same_inputs_and_other_seeds_others() {
        let corpus = [b"hello world".to_vec(), vec![0; 40]];
        let inputs = |seed| {
            let mut all = Vec::new();
            fuzz_times(200, &corpus, seed, 64, |input| {
                all.push(input.to_vec());
                Ok(())
            })
            .unwrap();
            all
        };
        assert_eq!(inputs(1), inputs(1));
        assert_ne!(inputs(1), inputs(2));
        assert!(inputs(1).iter().all(|input| input.len() <= 64));
    }

    #[test]
    #[should_panic(expected = "found it")]
    fn decoder_that_panics_on_a_rare_byte_is_caught() {
        let found = fuzz_times(100_000, &[vec![0; 8]], 3, 16, |input| {
            assert!(!input.contains(&0xa5), "found it");
            Ok(())
        });
        found.unwrap();
    }

    #[test]
    fn error_names_the_input() {
        let checked = fuzz_times(100_000, &[vec![0; 8]], 3, 16, |input| {
            anyhow::ensure!(!input.contains(&0xa5), "found it");
            Ok(())
        });
        let error = format!("{:#}", checked.unwrap_err());
        assert!(
            error.contains("a5") && error.ends_with("found it"),
            "{error}"
        );
    }
}
