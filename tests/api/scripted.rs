//! The routes without a socket and without a process: the test plays the worker.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use axum::{Router, response::Response};
use ebbtide::engine::sampler::Sampling;
use ebbtide::model::Model;
use ebbtide::server::dispatcher::{Dispatcher, WorkerLink};
use ebbtide::server::live::Live;
use ebbtide::server::queue::Queue;
use ebbtide::server::{Access, App, ServedModel, app};
use ebbtide::tokenizer::ChatTemplate;
use ebbtide::worker::protocol::{Delta, Done, EngineState, FinishReason, FromWorker, Generate, PlanSummary, Ready, ToWorker, WrittenToken};
use ebbtide::worker::supervisor::WorkerEvent;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tower::ServiceExt;

use crate::program::MODEL;

const PATIENCE: Duration = Duration::from_secs(20);

struct Link(UnboundedSender<ToWorker>);

impl WorkerLink for Link {
    fn send(&self, message: ToWorker) -> bool {
        self.0.send(message).is_ok()
    }
}

/// A server whose worker is the test.
pub struct Script {
    pub router: Router,
    pub events: UnboundedSender<WorkerEvent>,
    orders: UnboundedReceiver<ToWorker>,
    _stop: watch::Sender<bool>,
}

pub fn model() -> ServedModel {
    let model = Model::open(MODEL).expect("the bundled model");
    let template = model.file.metadata().string_opt("tokenizer.chat_template").expect("a string").expect("a template");
    ServedModel {
        name: "scripted".to_owned(),
        architecture: model.shape.architecture.to_string(),
        tokenizer: model.tokenizer().expect("a tokenizer"),
        template: Some(ChatTemplate::new(template).expect("it parses")),
        sampling: Sampling::default(),
        seed: None,
        ctx_tokens_max: 2048,
        n_vocab: model.shape.n_vocab,
        opened_unix_s: 0,
    }
}

pub fn ready() -> FromWorker {
    let plan = PlanSummary {
        budget_bytes: 100,
        reserve_bytes: 10,
        slots: 4,
        slot_bytes: 5,
        experts: 8,
        head_bytes: 20,
        chunk: 64,
        block: 128,
        head_alias: false,
        decode: Vec::new(),
        prefill: Vec::new(),
    };
    let device = "a script".to_owned();
    FromWorker::Ready(Box::new(Ready { ctx_tokens: 2048, n_vocab: 4096, device, plan, engine: EngineState::default() }))
}

pub fn done(finish: FinishReason) -> Done {
    Done {
        finish,
        prompt_tokens: 10,
        reused_tokens: 4,
        common_tokens: 5,
        completion_tokens: 3,
        reasoning_tokens: 1,
        way: "loan".to_owned(),
        way_reason: "the script says so".to_owned(),
        chunk: 64,
        block: 128,
        read_s: 0.5,
        write_s: 0.25,
        hits: 3,
        misses: 1,
        drafts_offered: 0,
        drafts_accepted: 0,
        slots_lent: 2,
        head_reloads: 0,
        recaptures: 0,
        link_bytes: 0,
        engine: EngineState::default(),
    }
}

impl Script {
    /// One whose worker is still to say that it is ready.
    pub fn loading(queue_max: usize) -> Self {
        Self::with(queue_max, Access::default())
    }

    pub fn with(queue_max: usize, access: Access) -> Self {
        let (queue, live) = (Arc::new(Queue::new(queue_max)), Arc::new(Live::default()));
        let shared = Arc::new(App::new(Arc::clone(&queue), Arc::clone(&live), access));
        shared.model.set(Arc::new(model())).expect("it is the first");
        let (events, from_worker) = unbounded_channel();
        let (to_worker, orders) = unbounded_channel();
        let (stop_sender, stop) = watch::channel(false);
        let dispatcher = Dispatcher { queue, live, link: Link(to_worker), events: from_worker, log: Arc::new(|_| ()) };
        tokio::spawn(dispatcher.run(stop));
        Self { router: app(shared), events, orders, _stop: stop_sender }
    }

    /// One that is ready.
    pub async fn ready(queue_max: usize) -> Self {
        let script = Self::loading(queue_max);
        script.say(ready());
        script.until(|status| status["health"] == "ready").await;
        script
    }

    pub fn say(&self, message: FromWorker) {
        self.events.send(WorkerEvent::Message(message)).expect("the dispatcher listens");
    }

    /// Says that a piece of the answer was written, with one token behind it.
    pub fn wrote(&self, id: u64, delta: Delta) {
        self.say(FromWorker::Wrote { id, deltas: vec![delta], tokens: vec![WrittenToken { id: 1, logprobs: None }] });
    }

    pub fn done(&self, id: u64, finish: FinishReason) {
        self.say(FromWorker::Done { id, done: Box::new(done(finish)) });
    }

    /// The next order.
    pub async fn order(&mut self) -> ToWorker {
        tokio::time::timeout(PATIENCE, self.orders.recv()).await.expect("an order comes").expect("the dispatcher lives")
    }

    /// The next request.
    pub async fn generate(&mut self) -> Generate {
        match self.order().await {
            ToWorker::Generate(generate) => *generate,
            other => panic!("{other:?}"),
        }
    }

    /// The next order, however long it takes; `None` where the server is gone.
    pub async fn next_order(&mut self) -> Option<ToWorker> {
        self.orders.recv().await
    }

    /// Whether a request has been cancelled, as it shows within a moment.
    pub async fn is_cancelled(&mut self, id: u64) -> bool {
        tokio::time::sleep(Duration::from_millis(10)).await;
        matches!(self.orders.try_recv(), Ok(ToWorker::Cancel { id: cancelled }) if cancelled == id)
    }

    /// True where no order is waiting.
    pub fn is_idle(&mut self) -> bool {
        self.orders.is_empty()
    }

    pub async fn send(&self, method: &str, path: &str, body: impl Into<Body>) -> Response {
        let request = Request::builder().method(method).uri(path).header("host", "localhost").body(body.into()).expect("a request");
        self.router.clone().oneshot(request).await.expect("routes do not fail")
    }

    /// Sends a request in the background, so that the test can play the worker.
    pub fn post(&self, path: &str, body: &Value) -> tokio::task::JoinHandle<Response> {
        let request = Request::builder().method("POST").uri(path).header("host", "localhost");
        let request = request.body(Body::from(body.to_string())).expect("a request");
        let router = self.router.clone();
        tokio::spawn(async move { router.oneshot(request).await.expect("routes do not fail") })
    }

    pub fn chat(&self, fields: Value) -> tokio::task::JoinHandle<Response> {
        let mut body = json!({ "messages": [{ "role": "user", "content": "Hi" }] });
        crate::program::merge(&mut body, fields);
        self.post("/v1/chat/completions", &body)
    }

    pub async fn status(&self) -> Value {
        json_of(self.send("GET", "/v1/status", "").await).await
    }

    /// Waits until the status says what is expected.
    pub async fn until(&self, holds: impl Fn(&Value) -> bool) {
        let waited = tokio::time::timeout(PATIENCE, async {
            while !holds(&self.status().await) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        waited.await.expect("the status comes to what is expected");
    }
}

pub async fn text_of(response: Response) -> String {
    let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a whole body");
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

pub async fn json_of(response: Response) -> Value {
    let text = text_of(response).await;
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// What a test waits for that was started in the background.
pub async fn finished<T>(task: tokio::task::JoinHandle<T>) -> T {
    tokio::time::timeout(PATIENCE, task).await.expect("it ends in time").expect("it does not panic")
}
