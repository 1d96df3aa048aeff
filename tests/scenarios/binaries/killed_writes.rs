//! A server that is killed while it writes orders and join tokens starts again each time, and has all
//! that it answered for.
//!
//! 1,000 kills with `CULVERT_TEST_GEAR=full`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tunnel_ca::revocation::OrderAction;
use tunnel_ca::tokens::TokenState;
use tunnel_server::admin::pages::PageQuery;
use tunnel_server::admin::{AdminClient, AdminError, CreateToken, NodesOrder};
use tunnel_store::data_dir::DataDir;
use tunnel_tests::eventually::scaled;
use tunnel_tests::gear::Gear;
use tunnel_tests::process::{ScratchDir, Server, ServerSetup};

use crate::abuse::report_figure;

#[tokio::test(flavor = "multi_thread")]
async fn server_that_is_killed_at_any_write_has_all_that_it_answered_for() -> Result<()> {
    let kills = Gear::current().pick(KILLS_QUICK, KILLS_FULL);
    let scratch = ScratchDir::new()?;
    let mut figures = Figures::default();
    for life in 0..kills.div_ceil(KILLS_OF_A_LIFE) {
        let folder = scratch.path().join(format!("server-{life}"));
        let setup = ServerSetup::on_loopback(&folder);
        let mut writers: Vec<_> = (0..WRITERS).map(Writer::new).collect();
        for _ in 0..KILLS_OF_A_LIFE.min(kills - figures.kills) {
            let server = setup.start().await?;
            let admin = admin(&folder).await?;
            check(&admin, &mut writers, &mut figures).await?;
            writers = write_until_killed(server, &admin, writers, &mut figures).await?;
            figures.kills += 1;
        }
        let _last = setup.start().await?;
        check(&admin(&folder).await?, &mut writers, &mut figures).await?;
    }
    let Figures {
        kills,
        answered,
        unanswered,
        saved,
    } = figures;
    report_figure(&format!(
        "{kills} kills: all of {answered} changes that were answered for are there; of {unanswered} others {saved} orders and \
         revocations are"
    ));
    ensure!(answered > kills && unanswered > 0);
    Ok(())
}

#[derive(Debug, Default)]
struct Figures {
    kills: usize,
    answered: usize,
    /// Changes that were in progress at a kill.
    unanswered: usize,
    /// How many of them were saved.
    saved: usize,
}

/// Changes its node and its tokens, one after the other, and knows what the server has answered for.
#[derive(Debug)]
struct Writer {
    node: String,
    is_revoked: bool,
    /// Whether each token is revoked, by id.
    tokens: BTreeMap<String, bool>,
    /// The change that was not answered.
    in_progress: Option<Change>,
}

#[derive(Debug, Clone)]
enum Change {
    Order(OrderAction),
    Create,
    RevokeToken(String),
}

impl Writer {
    fn new(number: usize) -> Self {
        Self {
            node: format!("worker-{number}"),
            is_revoked: false,
            tokens: BTreeMap::new(),
            in_progress: None,
        }
    }

    /// Makes changes until the server is killed.
    async fn write(
        mut self,
        admin: AdminClient,
        answered: Arc<watch::Sender<usize>>,
    ) -> Result<Self> {
        let mut step = 0;
        loop {
            let change = self.next(step);
            self.in_progress = Some(change.clone());
            match self.make(&admin, change).await {
                Ok(()) => {}
                Err(error) if is_lost(&error) => return Ok(self),
                refused => refused?,
            }
            self.in_progress = None;
            answered.send_modify(|count| *count += 1);
            step += 1;
        }
    }

    fn next(&self, step: usize) -> Change {
        let valid = self.tokens.iter().find(|(_, is_revoked)| !**is_revoked);
        match (step % 3, valid) {
            (0, _) if self.is_revoked => Change::Order(OrderAction::Unrevoke),
            (0, _) => Change::Order(OrderAction::Revoke),
            (1, Some((id, _))) => Change::RevokeToken(id.clone()),
            _ => Change::Create,
        }
    }

    async fn make(&mut self, admin: &AdminClient, change: Change) -> Result<()> {
        match change {
            Change::Order(action) => {
                let nodes = vec![self.node.clone()];
                let outcome = admin.order(&NodesOrder { action, nodes }).await?;
                ensure!(outcome.pending.is_empty(), "{outcome:?}");
                self.is_revoked = action == OrderAction::Revoke;
            }
            Change::Create => {
                let request = CreateToken {
                    // No order is about this node, so that no token is void.
                    node: format!("{}-new", self.node).parse()?,
                    uses: None,
                    needs_approval: false,
                    ttl_seconds: 3600,
                    ips: Vec::new(),
                    labels: BTreeMap::new(),
                };
                let created = admin.create_token(&request).await?;
                self.tokens.insert(created.id, false);
            }
            Change::RevokeToken(id) => {
                ensure!(admin.revoke_token(&id).await?);
                self.tokens.insert(id, true);
            }
        }
        Ok(())
    }

    /// Compares what a server has with what one answered for. A change that was not answered may be
    /// there or not.
    fn check(&mut self, found: &ServerState, figures: &mut Figures) -> Result<()> {
        let unanswered = self.in_progress.take();
        figures.unanswered += usize::from(unanswered.is_some());
        let is_revoked = found.revoked.contains(&self.node);
        if is_revoked != self.is_revoked {
            ensure!(matches!(unanswered, Some(Change::Order(_))), "{self:?}");
            self.is_revoked = is_revoked;
            figures.saved += 1;
        }
        for (id, is_revoked) in &mut self.tokens {
            let state = found.tokens.get(id);
            let state = *state.with_context(|| format!("token {id} of {} is lost", self.node))?;
            if (state == TokenState::Revoked) == *is_revoked {
                continue;
            }
            let is_unanswered = matches!(&unanswered, Some(Change::RevokeToken(of)) if of == id);
            ensure!(is_unanswered, "token {id} of {}: {state:?}", self.node);
            *is_revoked = true;
            figures.saved += 1;
        }
        Ok(())
    }
}

/// Returns whether a change failed because the server was killed.
fn is_lost(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<AdminError>();
    error.is_some_and(|error| !matches!(error, AdminError::Refused { .. } | AdminError::Timeout))
}

/// What a server has after a start.
struct ServerState {
    revoked: BTreeSet<String>,
    tokens: BTreeMap<String, TokenState>,
}

async fn check(admin: &AdminClient, writers: &mut [Writer], figures: &mut Figures) -> Result<()> {
    let all = PageQuery {
        after: None,
        limit: WRITERS,
    };
    let revoked = admin.revocations(&all).await?.revocations.into_iter();
    let tokens = admin.tokens().await?.into_iter();
    let found = ServerState {
        revoked: revoked.map(|revoked| revoked.node.to_string()).collect(),
        tokens: tokens.map(|token| (token.id, token.state)).collect(),
    };
    for writer in writers {
        writer.check(&found, figures)?;
    }
    Ok(())
}

/// Lets the writers change things all at once, and kills the server after a random number of changes,
/// while others are in progress.
async fn write_until_killed(
    server: Server,
    admin: &AdminClient,
    writers: Vec<Writer>,
    figures: &mut Figures,
) -> Result<Vec<Writer>> {
    let answered = Arc::new(watch::Sender::new(0));
    let mut writing = JoinSet::new();
    for writer in writers {
        writing.spawn(writer.write(admin.clone(), answered.clone()));
    }
    let changes = rand::random_range(1..=CHANGES_MAX);
    let mut count = answered.subscribe();
    let reached = count.wait_for(|count| *count >= changes);
    timeout(scaled(TIMEOUT), reached).await??;
    server.into_process().kill().await?;
    let writers = writing.join_all().await.into_iter().collect();
    figures.answered += *answered.borrow();
    writers
}

async fn admin(folder: &Path) -> Result<AdminClient> {
    let connected = AdminClient::connect(&DataDir::open_existing(folder)?).await?;
    connected.context("no server answers")
}

const KILLS_QUICK: usize = 24;
const KILLS_FULL: usize = 1000;
/// Kills with one data directory, so that the lists stay short.
const KILLS_OF_A_LIFE: usize = 50;
const WRITERS: usize = 4;
/// Maximum number of changes that are answered before a kill.
const CHANGES_MAX: usize = 20;
const TIMEOUT: Duration = Duration::from_secs(30);
