//! A reader of objects by their paths, with a time limit for each.

use std::time::{Duration, SystemTime};

use http::{Method, Request, header};
use kube::Client;
use kube::client::Body;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Instant;

use crate::cluster::api_call::with_limit;
use crate::cluster::clock::date;
use crate::cluster::failure::{ApiError, ApiErrorKind};
use crate::routing::clock::ClockReading;

pub(crate) use tunnel_doctor::Fact;

/// A reader with the credentials of the command.
pub(super) struct Reader {
    client: Client,
}

/// A page of a list.
#[derive(Deserialize)]
struct Page<T> {
    metadata: PageMetadata,
    items: Vec<T>,
}

#[derive(Deserialize)]
struct PageMetadata {
    #[serde(rename = "continue", default)]
    next: Option<String>,
}

impl Reader {
    pub(super) fn new(client: Client) -> Self {
        Self { client }
    }

    /// Returns an object, or `None` if it does not exist.
    pub(super) async fn get<T: DeserializeOwned>(&self, path: &str) -> Fact<Option<T>> {
        match self.call(Method::GET, path, Vec::new()).await {
            Ok(object) => Ok(Some(object)),
            Err(failure) if failure.kind == ApiErrorKind::NotFound => Ok(None),
            Err(failure) => Err(failure.to_string()),
        }
    }

    /// Returns the object with this name among those of a path, or `None` if it does not exist. Needs
    /// only the right to list the object.
    pub(super) async fn find<T: DeserializeOwned>(
        &self,
        path: &str,
        name: &str,
    ) -> Fact<Option<T>> {
        let named = format!("metadata.name={name}");
        let listed = self.pages(path, "fieldSelector", &named).await;
        let found = listed.map_err(|failure| failure.to_string())?;
        Ok(found.into_iter().next())
    }

    /// Returns all objects of a path that have the labels of `selector`.
    pub(super) async fn list<T: DeserializeOwned>(
        &self,
        path: &str,
        selector: &str,
    ) -> Fact<Vec<T>> {
        let listed = self.pages(path, "labelSelector", selector).await;
        listed.map_err(|failure| failure.to_string())
    }

    /// Returns all objects of a path, none if the API server does not serve their kind.
    pub(super) async fn list_served<T: DeserializeOwned>(&self, path: &str) -> Fact<Vec<T>> {
        match self.pages(path, "labelSelector", "").await {
            Ok(items) => Ok(items),
            Err(failure) if failure.kind == ApiErrorKind::NotFound => Ok(Vec::new()),
            Err(failure) => Err(failure.to_string()),
        }
    }

    async fn pages<T: DeserializeOwned>(
        &self,
        path: &str,
        selector: &str,
        selected: &str,
    ) -> Result<Vec<T>, ApiError> {
        let listing = async {
            let (mut items, mut next) = (Vec::new(), String::new());
            loop {
                let mut query = form_urlencoded::Serializer::new(String::new());
                query.append_pair("limit", PAGE_SIZE);
                query.append_pair(selector, selected);
                query.append_pair("continue", &next);
                let target = format!("{path}?{}", query.finish());
                let page: Page<T> = self.call(Method::GET, &target, Vec::new()).await?;
                items.extend(page.items);
                if items.len() > ITEMS_MAX {
                    let text = format!("{path} has more than {ITEMS_MAX} objects");
                    return Err(ApiError::new(ApiErrorKind::Invalid, text));
                }
                match page.metadata.next.filter(|token| !token.is_empty()) {
                    Some(token) => next = token,
                    None => return Ok::<_, ApiError>(items),
                }
            }
        };
        with_limit(LIST_LIMIT, listing).await
    }

    /// Posts an object that the API server answers and does not store.
    pub(super) async fn review(&self, path: &str, review: &Value) -> Fact<Value> {
        let answer = self.call(Method::POST, path, review.to_string().into_bytes());
        answer.await.map_err(|failure| failure.to_string())
    }

    /// Returns by how many seconds the clock of this host is ahead of the API server's.
    pub(super) async fn clock_ahead(&self) -> Fact<i64> {
        let request = Request::get("/version").body(Body::empty());
        let request = request.map_err(|error| error.to_string())?;
        let answer = with_limit(CALL_LIMIT, self.client.send(request)).await;
        let answer = answer.map_err(|failure| failure.to_string())?;
        let date = date(answer.headers()).ok_or(NO_DATE)??;
        Ok(ClockReading::new(date).seconds_ahead(SystemTime::now(), Instant::now()))
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<T, ApiError> {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| ApiError::new(ApiErrorKind::Invalid, error.to_string()))?;
        with_limit(CALL_LIMIT, self.client.request(request)).await
    }
}

const NO_DATE: &str = "the API server's answer has no date";
/// Number of objects in a page.
const PAGE_SIZE: &str = "500";
/// Maximum number of objects of a list: more than a cluster of supported size has.
const ITEMS_MAX: usize = 100_000;
/// Time limit of one call.
const CALL_LIMIT: Duration = Duration::from_secs(6);
/// Time limit of all pages of a list. Two lists in a row fit into the 30 s of the command.
const LIST_LIMIT: Duration = Duration::from_secs(12);
