//! Any bytes as a DNS query. The same runs with a seeded generator in `tests/scenarios/dns/hostile.rs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|message: &[u8]| {
    tunnel_tests::dns::keeps_the_rules(message).expect("a rule of the embedded DNS");
});
