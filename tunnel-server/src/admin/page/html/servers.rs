//! The servers as a picture and as a list. Pure.

use std::time::SystemTime;

use crate::admin::page::facts::{ServerFacts, ServersDocument};
use crate::admin::page::picture::{LinkState, Picture, ServerBox};
use crate::admin::page::text::{RelativeTime, grouped};
use crate::admin::page::visible::ending;

/// The servers as a picture and as a list.
#[derive(Debug)]
pub(super) struct ServersView<'a> {
    pub(super) picture: Picture,
    pub(super) rows: Vec<ServerRow<'a>>,
}

#[derive(Debug)]
pub(super) struct ServerRow<'a> {
    pub(super) facts: &'a ServerFacts,
    /// The place of its box in the picture, and its name as far as it fits into that.
    pub(super) at: Option<ServerBox>,
    pub(super) short: String,
    pub(super) color: &'static str,
    pub(super) state: &'static str,
    pub(super) is_gone: bool,
    pub(super) nodes: String,
    pub(super) since: Option<RelativeTime>,
}

impl<'a> ServersView<'a> {
    pub(super) fn new(document: &'a ServersDocument, now: SystemTime) -> Self {
        let servers = &document.servers;
        let is_linked = |one: Option<&ServerFacts>, other: Option<&ServerFacts>| {
            let linked = one?.linked.as_ref()?;
            Some(
                linked
                    .iter()
                    .any(|name| Some(name.as_str()) == other.map(|other| other.name.as_str())),
            )
        };
        let link = |from: usize, to: usize| {
            let (from, to) = (servers.get(from), servers.get(to));
            match (is_linked(from, to), is_linked(to, from)) {
                (Some(false), _) | (_, Some(false)) => LinkState::Down,
                (None, None) => LinkState::Unknown,
                (Some(true), _) | (_, Some(true)) => LinkState::Up,
            }
        };
        let picture = Picture::new(servers.len(), link);
        let row = |(index, facts): (usize, &'a ServerFacts)| {
            let (color, state) = match facts.state {
                "connecting" | "suspect" => ("away", "no answer"),
                "leaving" => ("suspect", "leaving"),
                "this" => ("live", "this server"),
                _ => ("live", "connected"),
            };
            ServerRow {
                at: picture.boxes.get(index).copied(),
                short: ending(facts.name.as_str(), SERVER_SHOWN),
                facts,
                color,
                state,
                is_gone: facts.state == "connecting",
                nodes: grouped(facts.nodes as u64),
                since: (facts.since.as_deref()).map(|at| RelativeTime::lasting(at, now)),
            }
        };
        let rows = servers.iter().enumerate().map(row).collect();
        Self { picture, rows }
    }
}

/// Characters of a server's name in the picture.
const SERVER_SHOWN: usize = 9;
