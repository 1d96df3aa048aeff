//! T04: guessed tokens are refused and do not delay enrollments with valid tokens.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rcgen::{CertificateParams, KeyPair};
use tokio::task::JoinSet;
use tunnel_proto::wire::code::EnrollCode;
use tunnel_proto::wire::enroll::{EnrollReply, EnrollRequest, JoinToken, TOKEN_SECRET_BYTES};
use tunnel_tests::env::{Agent, TestEnv, WAIT_TIMEOUT};
use tunnel_tests::eventually::eventually;
use tunnel_tests::metrics::{meta_page, value};
use tunnel_tests::scripted::enroll;

fn csr() -> Result<Vec<u8>> {
    let request = CertificateParams::default().serialize_request(&KeyPair::generate()?)?;
    Ok(request.der().to_vec())
}

#[tokio::test(flavor = "multi_thread")]
async fn t04_thousand_bad_tokens_from_one_address_do_not_stop_200_good_ones() -> Result<()> {
    let env = TestEnv::start().await?;
    let (address, pin) = (env.bound().agents, env.ca().spki_sha256());
    let mut random = SmallRng::seed_from_u64(4);
    let mut requests = Vec::new();
    for index in 0..200 {
        let name = format!("worker-{index}");
        let good = EnrollRequest {
            token: env.token(&name, &[])?.reveal().into(),
            csr: csr()?,
            node_name: name.parse()?,
            proof: None,
            is_known: false,
        };
        for _ in 0..5 {
            let guess = JoinToken::new(
                "abcdef012345",
                &random.random::<[u8; TOKEN_SECRET_BYTES]>(),
                Some(pin),
            )?;
            let bad = EnrollRequest {
                token: guess.reveal().into(),
                ..good.clone()
            };
            requests.push((false, bad));
        }
        requests.push((true, good));
    }
    let mut answers = JoinSet::new();
    let (mut issued, mut limited, mut refused) = (0, 0, 0);
    let mut pending = requests.into_iter();
    loop {
        while answers.len() < 16
            && let Some((good, request)) = pending.next()
        {
            answers.spawn(async move { (good, enroll(address, pin, &request).await) });
        }
        let Some(answer) = answers.join_next().await else {
            break;
        };
        let (good, reply) = answer?;
        match (good, reply.context("no answer")?) {
            (true, EnrollReply::Issued { .. }) => issued += 1,
            (false, EnrollReply::Refused(EnrollCode::BadToken, _)) => refused += 1,
            (false, EnrollReply::Refused(EnrollCode::RateLimited, _)) => limited += 1,
            (good, reply) => anyhow::bail!("good {good}: {reply:?}"),
        }
    }
    ensure!(issued == 200, "{issued} of 200");
    ensure!(
        refused + limited == 1000 && limited > 0,
        "{refused} and {limited}"
    );
    Ok(())
}

/// The agent ends the handshake with a server that has not the CA of its token. A request with any
/// token would count as refused.
#[tokio::test(flavor = "multi_thread")]
async fn agent_with_a_token_of_another_ca_is_counted_as_a_failed_handshake() -> Result<()> {
    let (env, other) = (TestEnv::start().await?, TestEnv::start().await?);
    let config = other.agent_config_with("worker-1", |settings| {
        settings.server = vec![env.bound().agents.to_string()];
    })?;
    let _agent = Agent::start(config).await?;
    let all = "tunnel_server_enrollments_total";
    let failed = "tunnel_server_enrollments_total{result=\"handshake_failed\"}";
    eventually("the count of the server", WAIT_TIMEOUT, async || {
        let page = meta_page(env.meta(), "/metrics").await?;
        let counts = [all, failed].map(|series| value(&page, series));
        // The agent tries again.
        let [all, failed] = counts;
        ensure!(all >= Some(1) && all == failed, "{counts:?}");
        anyhow::Ok(())
    })
    .await;
    ensure!(env.nodes().snapshot().is_empty());
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn t04_ten_thousand_guesses_get_nothing_and_see_the_limit() -> Result<()> {
    let env = TestEnv::start().await?;
    let token = env.token("worker-1", &[])?;
    let pin = env.ca().spki_sha256();
    let (node, now) = ("worker-1".parse()?, SystemTime::now());
    let mut random = SmallRng::seed_from_u64(10_000);
    let (mut answered, mut limited) = (0, 0);
    for round in 0..10_000 {
        // Half of the guesses use the valid id, because logs and lists show ids.
        let id = if round % 2 == 0 {
            token.id()
        } else {
            "abcdef012345"
        };
        let guess = JoinToken::new(id, &random.random::<[u8; TOKEN_SECRET_BYTES]>(), Some(pin))?;
        match env
            .tokens()
            .redeem(&guess.reveal(), &node, [1; 32], &|_| Some(false), now)
        {
            Err((EnrollCode::BadToken, detail)) => {
                ensure!(!detail.contains(&guess.reveal()));
                answered += 1;
            }
            Err((EnrollCode::RateLimited, _)) => limited += 1,
            other => anyhow::bail!("{other:?}"),
        }
    }
    ensure!(
        answered == 65 && limited == 9935,
        "{answered} answered, {limited} limited"
    );
    // The valid token still works: with one key, for its node, until it expires.
    let right = token.reveal();
    let redeem = |node: &str, key, at| {
        let answer = env.tokens().redeem(
            &right,
            &node.parse().unwrap(),
            [key; 32],
            &|_| Some(false),
            at,
        );
        answer.map(drop).map_err(|(code, _)| code)
    };
    ensure!(redeem("worker-2", 1, now) == Err(EnrollCode::WrongNode));
    ensure!(redeem("worker-1", 1, now).is_ok());
    ensure!(redeem("worker-1", 2, now) == Err(EnrollCode::TokenUsed));
    let late = now + Duration::from_secs(2 * 3600);
    ensure!(redeem("worker-1", 1, late) == Err(EnrollCode::TokenExpired));
    Ok(())
}
