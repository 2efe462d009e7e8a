//! `/metrics` in Prometheus' text form.
//!
//! A few dozen numbers that are there already: written out by hand, since a registry would keep them a second time.

use std::fmt::{Display, Write};

use super::App;

/// The media type.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

struct Page(String);

impl Page {
    fn put(&mut self, kind: &str, name: &str, help: &str, value: impl Display) {
        let _ = write!(self.0, "# HELP ebbtide_{name} {help}\n# TYPE ebbtide_{name} {kind}\nebbtide_{name} {value}\n");
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.put("counter", name, help, value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.put("gauge", name, help, value);
    }
}

/// The page.
#[must_use]
pub fn page(app: &App) -> String {
    let snapshot = app.live.snapshot();
    let (waiting, clients, jobs_max) = app.queue.lengths();
    let totals = &snapshot.totals;
    let mut page = Page(String::new());
    page.gauge("up", "1 where requests are answered.", u8::from(snapshot.health.answers()));
    page.gauge("uptime_seconds", "Seconds since the server started.", app.started.elapsed().as_secs_f64());
    page.gauge("requests_running", "Requests in the engine.", u8::from(snapshot.running.is_some()));
    page.gauge("queue_waiting", "Answers that wait.", waiting);
    page.gauge("queue_clients", "Clients that wait.", clients);
    page.gauge("queue_max", "Answers that may wait.", jobs_max);
    let requests =
        [("completed", totals.completed), ("cancelled", totals.cancelled), ("failed", totals.failed), ("refused", totals.refused)];
    let _ = write!(page.0, "# HELP ebbtide_requests_total Requests by how they ended.\n# TYPE ebbtide_requests_total counter\n");
    for (end, count) in requests {
        let _ = writeln!(page.0, "ebbtide_requests_total{{end=\"{end}\"}} {count}");
    }
    page.counter("prompt_tokens_total", "Prompt tokens.", totals.prompt_tokens);
    page.counter("cached_tokens_total", "Prompt tokens that were not read again.", totals.cached_tokens);
    page.counter("completion_tokens_total", "Tokens written.", totals.completion_tokens);
    page.counter("read_seconds_total", "Seconds of reading prompts.", totals.read_s);
    page.counter("write_seconds_total", "Seconds of writing.", totals.write_s);
    page.counter("expert_hits_total", "Expert uses found in a slot.", totals.hits);
    page.counter("expert_misses_total", "Expert uses read from host memory.", totals.misses);
    page.counter("link_bytes_total", "Bytes of experts over the link.", totals.link_bytes);
    page.counter("drafts_offered_total", "Drafts offered.", totals.drafts_offered);
    page.counter("drafts_accepted_total", "Drafts accepted.", totals.drafts_accepted);
    page.counter("head_reloads_total", "Times the output head was brought back.", totals.head_reloads);
    page.counter("recaptures_total", "Windows captured again.", totals.recaptures);
    page.counter("worker_starts_total", "Workers started.", totals.worker_starts);
    page.counter("worker_deaths_total", "Workers that died.", totals.worker_deaths);
    page.gauge("expert_slots", "Expert slots in use.", snapshot.engine.slots);
    page.gauge("prefix_cache_bytes", "Host memory of parked conversations.", snapshot.engine.prefix_bytes);
    page.counter("prefix_parked_total", "Conversations parked since the worker started.", snapshot.engine.parked);
    page.counter("prefix_resumed_total", "Parked conversations resumed since the worker started.", snapshot.engine.resumed);
    if let Some(free) = snapshot.engine.lowest_free_bytes {
        page.gauge("device_lowest_free_bytes", "Lowest free device memory in the last request.", free);
    }
    if let Some(ready) = &snapshot.ready {
        page.gauge("context_tokens", "Tokens of context.", ready.ctx_tokens);
    }
    page.0
}
