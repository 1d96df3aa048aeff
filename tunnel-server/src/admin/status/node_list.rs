//! The list of nodes that all pages share. With many nodes, making it takes longer than a page.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::{Instant, sleep};
use tunnel_proto::process::making::{DOCUMENT_MAX_AGE, MakingCost};
use tunnel_proto::process::shutdown::Shutdown;

use super::NodeStatus;

/// Lists the nodes with their status. The list is shared while making it costs much, and is freed
/// when it is too old to be shared.
pub struct NodeList {
    list: Box<dyn Fn() -> Vec<NodeStatus> + Send + Sync>,
    /// The lock is held while the next list is made, so that one is made at a time.
    latest: Arc<Mutex<Latest>>,
    tasks: Shutdown,
}

#[derive(Default)]
struct Latest {
    cost: MakingCost,
    list: Option<(Instant, Arc<Vec<NodeStatus>>)>,
}

impl fmt::Debug for NodeList {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("NodeList").finish_non_exhaustive()
    }
}

impl NodeList {
    /// Creates a list that `list` makes. `tasks` runs the task that frees it.
    pub fn new(
        list: impl Fn() -> Vec<NodeStatus> + Send + Sync + 'static,
        tasks: &Shutdown,
    ) -> Arc<Self> {
        Arc::new(Self {
            list: Box::new(list),
            latest: Arc::default(),
            tasks: tasks.clone(),
        })
    }

    /// Returns the nodes. Blocks the thread, so it must not run on a thread of the runtime.
    #[must_use]
    pub fn load(&self) -> Arc<Vec<NodeStatus>> {
        let asked = Instant::now();
        let mut latest = self.latest.lock();
        let Latest { cost, list } = &mut *latest;
        if let Some((began, nodes)) = list
            && (*began >= asked || cost.is_reusable(*began, Instant::now()))
        {
            return nodes.clone();
        }
        let began = Instant::now();
        let nodes = Arc::new((self.list)());
        cost.add(began, Instant::now());
        let is_freed = list.replace((began, nodes.clone())).is_some();
        drop(latest);
        if !is_freed {
            self.tasks.spawn_service(free_unused(self.latest.clone()));
        }
        nodes
    }
}

/// Waits until the list is too old to be shared, and frees it.
async fn free_unused(latest: Arc<Mutex<Latest>>) {
    loop {
        sleep(DOCUMENT_MAX_AGE).await;
        let list = &mut latest.lock().list;
        let freed = list.take_if(|(began, _)| began.elapsed() >= DOCUMENT_MAX_AGE);
        if freed.is_some() || list.is_none() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn list_is_made_for_each_request_and_freed_after_a_second() {
        let list = NodeList::new(|| vec![NodeStatus::default()], &Shutdown::new());
        let (one, other) = (list.load(), list.load());
        assert!(Arc::ptr_eq(&one, &other), "both of one moment");
        tokio::time::advance(DOCUMENT_MAX_AGE / 2).await;
        let later = list.load();
        assert!(!Arc::ptr_eq(&one, &later), "a cheap list is not reused");
        sleep(2 * DOCUMENT_MAX_AGE).await;
        assert_eq!(Arc::strong_count(&later), 1, "freed");
    }
}
