use std::net::Ipv4Addr;

use tokio::task::JoinSet;

use super::*;

const CALLER: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn user(name: &str) -> Arc<ClusterUser> {
    Arc::new(ClusterUser {
        name: name.to_owned(),
        ..ClusterUser::default()
    })
}

/// What answers the questions, and the questions so far.
struct Cluster {
    asked: Arc<Mutex<Vec<String>>>,
    tasks: JoinSet<()>,
}

/// Answers each question after this time: that a right is one of `allowed`, and that a token is that of
/// the user `good` if it begins with this word.
fn answering(allowed: &'static [&'static str], time: Duration) -> (AccessReviewer, Cluster) {
    let (reviewer, queues) = AccessReviewer::new(None);
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let mut tasks = JoinSet::new();
    for (mut queue, most) in [
        (queues.rights, 8),
        (queues.known_tokens, 4),
        (queues.new_tokens, 4),
    ] {
        let asked = Arc::clone(&asked);
        tasks.spawn(async move {
            let calls = Arc::new(Semaphore::new(most));
            let mut answers = JoinSet::new();
            while let Some(request) = queue.recv().await {
                let call = calls.clone().acquire_owned().await;
                let asked = Arc::clone(&asked);
                answers.spawn(async move {
                    tokio::time::sleep(time).await;
                    asked.lock().push(answer(request, allowed));
                    drop(call);
                });
            }
        });
    }
    (reviewer, Cluster { asked, tasks })
}

/// Answers a question, and returns it.
fn answer(request: ReviewRequest, allowed: &[&str]) -> String {
    match request {
        ReviewRequest::Access { access, answer } => {
            let _gone = answer.send(Ok(allowed.contains(&access.subresource)));
            format!("{} {}", access.verb, access.subresource)
        }
        ReviewRequest::Token { token, answer } => {
            let good = ClusterUser {
                name: "good".to_owned(),
                ..ClusterUser::default()
            };
            let is_good = token.reveal().starts_with("good");
            let _gone = answer.send(Ok(is_good.then_some(good)));
            "token".to_owned()
        }
    }
}

#[tokio::test(start_paused = true)]
async fn own_subresource_is_asked_before_proxy_and_answers_last_for_seconds() {
    let (reviewer, cluster) = answering(&["proxy"], Duration::ZERO);
    let asked = &cluster.asked;
    let (ops, node) = (user("ops"), "edge-1".parse().unwrap());
    let allows = async |operation: Operation, method: &Method| {
        let allows = reviewer.allows(&ops, &node, operation, method);
        allows.await.unwrap()
    };
    assert!(allows(Operation::Pods, &Method::GET).await);
    assert!(!allows(Operation::Metrics, &Method::GET).await);
    assert!(allows(Operation::Exec, &Method::GET).await);
    assert!(!allows(Operation::Metrics, &Method::HEAD).await, "no verb");
    let once = ["get pods", "get proxy", "get metrics", "create proxy"];
    assert_eq!(*asked.lock(), once);
    assert!(allows(Operation::Exec, &Method::POST).await);
    assert_eq!(asked.lock().len(), once.len(), "remembered");
    tokio::time::advance(DENY_LASTS).await;
    assert!(!allows(Operation::Metrics, &Method::GET).await);
    assert!(allows(Operation::Exec, &Method::POST).await);
    assert_eq!(
        asked.lock().len(),
        once.len() + 1,
        "an answer that denies ends first"
    );
    assert_eq!(asked.lock().last().unwrap(), "get metrics");
    tokio::time::advance(ALLOW_LASTS).await;
    assert!(allows(Operation::Exec, &Method::POST).await);
    assert_eq!(asked.lock().len(), once.len() + 2);
}

#[tokio::test(start_paused = true)]
async fn answer_about_a_right_is_that_of_one_user_at_one_node() {
    let (reviewer, cluster) = answering(&["proxy"], Duration::ZERO);
    let mut in_group = ClusterUser::clone(&user("ops"));
    in_group.groups.push("admins".to_owned());
    for (user, node) in [
        (user("ops"), "edge-1"),
        (user("ops"), "edge-2"),
        (user("dev"), "edge-1"),
        (Arc::new(in_group), "edge-1"),
        (user("ops"), "edge-1"),
    ] {
        let node = node.parse().unwrap();
        let allows = reviewer.allows(&user, &node, Operation::Exec, &Method::GET);
        assert!(allows.await.unwrap());
    }
    assert_eq!(cluster.asked.lock().len(), 4, "the last one is remembered");
}

#[tokio::test(start_paused = true)]
async fn accepted_token_is_reviewed_again_after_seconds() {
    let (reviewer, cluster) = answering(&[], Duration::ZERO);
    let almost = ALLOW_LASTS - Duration::from_secs(1);
    for (time, reviews) in [
        (Duration::ZERO, 1),
        (almost, 1),
        (Duration::from_secs(1), 2),
    ] {
        tokio::time::advance(time).await;
        let user = reviewer.user_of("good", CALLER).await.unwrap();
        assert_eq!(user.unwrap().name, "good");
        assert_eq!(cluster.asked.lock().len(), reviews);
    }
}

#[tokio::test(start_paused = true)]
async fn source_has_a_budget_and_others_have_theirs() {
    let (reviewer, cluster) = answering(&[], Duration::ZERO);
    let asked = &cluster.asked;
    let ask =
        async |number: u32, caller: IpAddr| reviewer.user_of(&format!("{number}"), caller).await;
    for number in 0..TOKEN_BUDGET {
        assert_eq!(ask(number, CALLER).await, Ok(None));
    }
    assert_eq!(ask(TOKEN_BUDGET, CALLER).await, Err(ReviewError::TooMany));
    assert_eq!(ask(0, CALLER).await, Ok(None), "remembered");
    let other = Ipv4Addr::new(192, 0, 2, 1).into();
    assert_eq!(ask(TOKEN_BUDGET, other).await, Ok(None));
    assert_eq!(asked.lock().len(), 21);
    tokio::time::advance(BUDGET_TIME).await;
    assert_eq!(ask(TOKEN_BUDGET + 1, CALLER).await, Ok(None));
}

/// Ten sources send forged tokens as fast as they may, and the API server takes 100 ms for a review.
#[tokio::test(start_paused = true)]
async fn forged_tokens_delay_neither_known_tokens_nor_rights_and_hardly_new_tokens_of_others() {
    const REVIEW: Duration = Duration::from_millis(100);
    let (reviewer, mut cluster) = answering(&["metrics"], REVIEW);
    assert!(reviewer.user_of("good", CALLER).await.unwrap().is_some());
    tokio::time::advance(ALLOW_LASTS).await;
    for number in 0..10 * TOKEN_BUDGET {
        let reviewer = reviewer.clone();
        let forger = Ipv4Addr::from(0xc000_0200 + number % 10).into();
        cluster.tasks.spawn(async move {
            let _refused = reviewer.user_of(&format!("forged {number}"), forger).await;
        });
    }
    while reviewer.state.lock().pending.len() < 200 {
        tokio::task::yield_now().await;
    }
    let start = Instant::now();
    // The known token comes from a source of the forged ones.
    let forger = Ipv4Addr::from(0xc000_0200).into();
    let known = reviewer.user_of("good", forger);
    let (ops, node) = (user("ops"), "edge-1".parse().unwrap());
    let right = reviewer.allows(&ops, &node, Operation::Metrics, &Method::GET);
    let (known, right) = tokio::join!(known, right);
    assert!(known.unwrap().is_some() && right.unwrap());
    assert!(start.elapsed() < 2 * REVIEW, "{:?}", start.elapsed());
    let new = reviewer.user_of("good 2", CALLER).await;
    assert!(new.unwrap().is_some());
    // Two tokens of each of ten sources are before it, of which four are reviewed at once.
    assert!(start.elapsed() < 8 * REVIEW, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn callers_with_one_token_at_once_cause_one_review_which_outlives_the_first_of_them() {
    let (reviewer, cluster) = answering(&[], Duration::from_millis(100));
    let ask = || reviewer.user_of("good", CALLER);
    let first = timeout(Duration::from_millis(50), ask());
    let many = (0..10 * TOKEN_BUDGET).map(|_| ask());
    let (first, many) = tokio::join!(first, futures_util::future::join_all(many));
    assert!(first.is_err(), "it is gone");
    assert!(many.iter().all(|user| matches!(user, Ok(Some(_)))));
    assert_eq!(
        cluster.asked.lock().len(),
        2,
        "one for the first, and one for all others"
    );
    assert!(reviewer.state.lock().pending.is_empty());
}

#[tokio::test(start_paused = true)]
async fn asker_that_leaves_takes_its_question_along() {
    let (reviewer, _cluster) = answering(&[], Duration::from_millis(100));
    let asked = reviewer.user_of("good", CALLER);
    let asked = timeout(Duration::from_millis(50), asked).await;
    assert!(asked.is_err(), "it is gone");
    assert!(reviewer.state.lock().pending.is_empty());
}

#[tokio::test]
async fn cluster_that_does_not_answer_is_an_error() {
    let (reviewer, queues) = AccessReviewer::new(None);
    drop(queues);
    let asked = reviewer.user_of("token", CALLER).await;
    assert!(
        matches!(asked, Err(ReviewError::Unavailable(_))),
        "{asked:?}"
    );
}

#[test]
fn claims_name_an_account_or_none() {
    // {"sub":"system:serviceaccount:monitoring:prometheus-k8s"} in base64url.
    let payload = "eyJzdWIiOiJzeXN0ZW06c2VydmljZWFjY291bnQ6bW9uaXRvcmluZzpwcm9tZXRoZXVzLWs4cyJ9";
    let account = claimed_account(&format!("e30.{payload}.c2ln"));
    assert_eq!(account.as_deref(), Some("monitoring/prometheus-k8s"));
    // {"sub":"admin"}
    for token in [
        "",
        "abc",
        "a.b.c",
        "e30.eyJzdWIiOiJhZG1pbiJ9.c",
        "e30.e30.c",
        "a.b.c.d",
    ] {
        assert_eq!(claimed_account(token), None, "{token}");
    }
}

#[test]
fn full_table_loses_the_answer_that_ends_first() {
    let (mut answers, start) = (Answers::default(), Instant::now());
    let key = |number: usize| {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_be_bytes());
        key
    };
    let at = |millis: usize| start + Duration::from_millis(millis as u64);
    for number in 0..=ANSWERS_MAX {
        answers.insert(key(number), at(60_000 + number), number, start);
    }
    assert_eq!(answers.0.len(), ANSWERS_MAX);
    assert_eq!(answers.get(&key(0), start), None);
    assert_eq!(answers.get(&key(1), start), Some(&1));
    assert_eq!(answers.get(&key(ANSWERS_MAX), start), Some(&ANSWERS_MAX));
    answers.insert(key(0), at(200_000), 0, at(100_000));
    assert_eq!(answers.0.len(), 1, "those that are over go first");
}

#[test]
fn askers_of_a_second_are_bounded_and_those_that_are_counted_go_on() {
    let mut askers = Askers::new(2, 1);
    let start = askers.since;
    for asker in 0..ASKERS_MAX {
        assert!(askers.admit(asker, start).is_some(), "{asker}");
    }
    assert!(askers.admit(ASKERS_MAX, start).is_none());
    assert!(askers.admit(0, start).is_some());
    assert!(askers.admit(0, start).is_none(), "its budget is used up");
    let later = start + BUDGET_TIME;
    assert!(askers.admit(ASKERS_MAX, later).is_some());
}

#[test]
fn token_that_the_cluster_accepts_no_more_is_not_known() {
    let (reviewer, _queues) = AccessReviewer::new(None);
    let (key, good) = (key(&["token", "good"]), user("good"));
    let mut state = reviewer.state.lock();
    for user in [Some(&good), None] {
        state.reviewed_token(key, user);
        let is_known = state.accepted.get(&key, Instant::now()).is_some();
        assert_eq!(is_known, user.is_some());
    }
}

#[test]
fn questions_of_the_same_letters_differ_by_their_parts() {
    assert_ne!(key(&["a", "bc"]), key(&["ab", "c"]));
}
