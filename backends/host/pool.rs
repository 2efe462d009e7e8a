//! The thread pool of the `host` backend: one parallel loop at a time, with low latency.
//!
//! Workers watch an epoch counter for `SPIN` and then sleep. A loop is *open* while its caller still hands out tasks; a
//! worker that wakes too late finds the gate closed and simply misses the loop, so no caller ever waits for a sleeper.
//! Tasks are claimed one by one from an atomic counter. The order of claims is not fixed: whoever needs the same bits for
//! any number of threads lets each task own its part of the result.
#![allow(unsafe_code, reason = "the task closure is lent to other threads for the length of one call")]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker watches for work before it sleeps: longer than the pause between two kernels of a layer.
const SPIN: Duration = Duration::from_micros(80);
/// Bit of the gate that says the loop still hands out tasks; the bits below count the workers inside.
const OPEN: usize = 1 << (usize::BITS - 1);

thread_local! {
    /// True while this thread runs a task: a loop inside a task runs on the spot.
    static INSIDE_TASK: Cell<bool> = const { Cell::new(false) };
}

/// The pool could not be made.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The system refused a thread.
    #[error("worker thread {index} of {wanted} could not be started: {source}")]
    Spawn {
        /// The worker that failed, from 1 (0 is the caller).
        index: usize,
        /// Threads asked for, the caller included.
        wanted: usize,
        /// What the system said.
        source: std::io::Error,
    },
}

type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// A loop as workers see it. Written only while the gate is shut and nobody is inside.
#[derive(Clone, Copy)]
struct Loop {
    task: Option<*const Task<'static>>,
    n_tasks: usize,
}

struct Shared {
    current: UnsafeCell<Loop>,
    gate: AtomicUsize,
    next_task: AtomicUsize,
    epoch: AtomicU64,
    closing: AtomicBool,
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `current` is written by the one caller that holds `callers`, while the gate is shut and empty, and read by workers
// only between entering and leaving the gate; all else is atomics and locks. The task behind the pointer is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is never used outside an open loop.
unsafe impl Send for Shared {}

/// A fixed set of threads, the caller among them.
pub struct ThreadPool {
    shared: Arc<Shared>,
    callers: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// A pool of `n_threads` threads, of which the caller of [`run`](Self::run) is one; 0 counts as 1.
    ///
    /// # Errors
    /// [`PoolError::Spawn`] where the system has no thread left; those already started are joined.
    pub fn new(n_threads: usize) -> Result<Self, PoolError> {
        let wanted = n_threads.max(1);
        let shared = Arc::new(Shared {
            current: UnsafeCell::new(Loop { task: None, n_tasks: 0 }),
            gate: AtomicUsize::new(0),
            next_task: AtomicUsize::new(0),
            epoch: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep_lock: Mutex::new(()),
            wake: Condvar::new(),
            panic: Mutex::new(None),
        });
        let mut pool = Self { shared, callers: Mutex::new(()), workers: Vec::with_capacity(wanted - 1) };
        for index in 1..wanted {
            let shared = Arc::clone(&pool.shared);
            let worker = std::thread::Builder::new()
                .name(format!("host-{index}"))
                .spawn(move || shared.serve())
                .map_err(|source| PoolError::Spawn { index, wanted, source })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads of the pool, the caller included.
    #[must_use]
    pub fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task` once with each number below `n_tasks`, spread over the threads, and returns when all are done.
    ///
    /// A call from inside a task runs its loop on the calling thread.
    ///
    /// # Panics
    /// With the first panic of a task; tasks not yet claimed are then skipped. The pool stays usable.
    pub fn run(&self, n_tasks: usize, task: &Task<'_>) {
        if n_tasks <= 1 || self.workers.is_empty() || INSIDE_TASK.get() {
            (0..n_tasks).for_each(task);
            return;
        }
        let turn = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        // SAFETY: the lifetime is only made longer in the type: `run` does not return, nor unwind, before the gate is shut
        // and empty, after which no worker touches the pointer.
        let task_pointer = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(std::ptr::from_ref(task)) };
        // SAFETY: `turn` makes this the only caller, and the previous loop left the gate shut and empty.
        unsafe { *shared.current.get() = Loop { task: Some(task_pointer), n_tasks } };
        shared.next_task.store(0, Ordering::Relaxed);
        shared.gate.store(OPEN, Ordering::Release);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = shared.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner);
            shared.wake.notify_all();
        }
        shared.claim_tasks(task, n_tasks);
        shared.gate.fetch_and(!OPEN, Ordering::AcqRel);
        wait_until(|| shared.gate.load(Ordering::Acquire) == 0);
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = self.shared.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker catches the panics of its tasks, so there is nothing left to report here.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// A worker's life: wait for an epoch, take part if the gate is still open, again.
    fn serve(&self) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_epoch_after(seen);
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            if self.enter() {
                // SAFETY: this thread is counted in the gate, so the caller neither rewrites nor frees the loop.
                let (task, n_tasks) = unsafe { ((*self.current.get()).task, (*self.current.get()).n_tasks) };
                if let Some(task) = task {
                    // SAFETY: as above: the closure lives until this thread has left the gate.
                    self.claim_tasks(unsafe { &*task }, n_tasks);
                }
                self.gate.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Counts this thread in, unless the loop is over.
    fn enter(&self) -> bool {
        self.gate.fetch_update(Ordering::AcqRel, Ordering::Acquire, |gate| if gate & OPEN != 0 { Some(gate + 1) } else { None }).is_ok()
    }

    fn wait_for_epoch_after(&self, seen: u64) -> u64 {
        let start = Instant::now();
        while start.elapsed() < SPIN {
            for _ in 0..32 {
                let epoch = self.epoch.load(Ordering::Acquire);
                if epoch != seen {
                    return epoch;
                }
                std::hint::spin_loop();
            }
        }
        let mut guard = self.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let epoch = loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                break epoch;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        epoch
    }

    /// Runs tasks until none is left; a panic is kept for the caller and ends the loop early.
    fn claim_tasks(&self, task: &Task<'_>, n_tasks: usize) {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _inside = InsideTask::begin();
            loop {
                let index = self.next_task.fetch_add(1, Ordering::Relaxed);
                if index >= n_tasks {
                    break;
                }
                task(index);
            }
        }));
        if let Err(payload) = outcome {
            self.next_task.store(n_tasks, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
    }
}

/// Marks the thread as inside a task until dropped, also when the task panics.
struct InsideTask;

impl InsideTask {
    fn begin() -> Self {
        INSIDE_TASK.set(true);
        Self
    }
}

impl Drop for InsideTask {
    fn drop(&mut self) {
        INSIDE_TASK.set(false);
    }
}

/// Spins, and lets other threads run where the wait is long (more threads than cores).
fn wait_until(mut done: impl FnMut() -> bool) {
    let mut rounds = 0_u32;
    while !done() {
        rounds += 1;
        if rounds > 2_000 {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts_of(pool: &ThreadPool, n_tasks: usize) -> Vec<usize> {
        let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
        pool.run(n_tasks, &|task| {
            counts[task].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    }

    #[test]
    fn every_task_runs_exactly_once_for_any_number_of_threads() {
        for n_threads in [0, 1, 2, 3, 5] {
            let pool = ThreadPool::new(n_threads).expect("threads");
            assert_eq!(pool.n_threads(), n_threads.max(1));
            for n_tasks in [0, 1, 2, 7, 100] {
                assert_eq!(counts_of(&pool, n_tasks), vec![1; n_tasks]);
            }
        }
    }

    #[test]
    fn many_short_loops_lose_no_task_whether_workers_spin_or_sleep() {
        let pool = ThreadPool::new(3).expect("threads");
        for round in 0..300 {
            assert_eq!(counts_of(&pool, 9), vec![1; 9]);
            if round % 100 == 0 {
                std::thread::sleep(SPIN * 3);
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = ThreadPool::new(2).expect("threads");
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(50, &|task| assert!(task != 17, "task {task} fails"))));
        let payload = outcome.expect_err("the panic is passed on");
        assert_eq!(payload.downcast_ref::<String>().map(String::as_str), Some("task 17 fails"));
        assert_eq!(counts_of(&pool, 20), vec![1; 20]);
    }

    #[test]
    fn a_loop_inside_a_task_runs_on_the_spot() {
        let pool = ThreadPool::new(2).expect("threads");
        let total = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(5, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 20);
    }

    #[test]
    fn loops_from_several_threads_take_turns() {
        let pool = ThreadPool::new(2).expect("threads");
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        assert_eq!(counts_of(&pool, 6), vec![1; 6]);
                    }
                });
            }
        });
    }
}
