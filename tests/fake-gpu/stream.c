/* Order: streams, events and captured graphs.
 *
 * Work is queued and runs when somebody waits for it, so that a wait which the caller forgot shows as old or dead memory. A poll of an
 * event lets its stream do one piece of work more. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

/* A point in a stream; whoever waits for it holds it, so that recording an event again leaves earlier waiters alone. */
struct mark {
    unsigned holders;
    bool reached;
    struct timespec at;
    struct stream *stream;
};

struct event {
    struct mark *mark;
};

enum what { COPY, FILL, LAUNCH, REPLAY, RECORD, WAIT };

struct command {
    struct command *next;
    enum what what;
    uint64_t to, from;
    size_t bytes;
    unsigned char byte;
    struct mark *mark;
    struct graph_exec *graph;
    struct launch *launch;
};

struct queue {
    struct command *first, **end;
    size_t count;
};

struct graph {
    struct queue nodes;
};

/* Lives as long as its handle or a queued replay. */
struct graph_exec {
    struct queue nodes;
    unsigned holders;
};

enum capture { IDLE, RECORDING, INVALID };

struct stream {
    struct stream *next;
    struct context *context;
    struct queue queue;
    enum capture capture;
    int capture_mode;
    pthread_t capture_thread;
    struct queue recorded;
};

static void push(struct queue *queue, struct command *command) {
    if (!queue->first)
        queue->end = &queue->first;
    *queue->end = command;
    queue->end = &command->next;
    queue->count++;
}

static struct command *pop(struct queue *queue) {
    struct command *popped = queue->first;
    if (popped) {
        queue->first = popped->next;
        queue->count--;
    }
    return popped;
}

static void let_go_of_mark(struct mark *mark) {
    if (mark && --mark->holders == 0)
        free(mark);
}

static void clear(struct queue *queue);

static void let_go_of_exec(struct graph_exec *graph) {
    if (graph && --graph->holders == 0) {
        clear(&graph->nodes);
        free(graph);
    }
}

static void discard(struct command *command) {
    let_go_of_mark(command->mark);
    let_go_of_exec(command->graph);
    let_go_of_launch(command->launch);
    free(command);
}

static void clear(struct queue *queue) {
    for (struct command *command; (command = pop(queue));)
        discard(command);
}

/* The device is lost at the command that a setting names, or at dead memory. */
static int lose(int code) {
    return fake.lost = code;
}

static int run(const struct command *command);

/* Runs work of a stream, up to a mark in it or to its end. */
static int run_stream(struct stream *stream, const struct mark *until) {
    while (!(until && until->reached)) {
        struct command *command = pop(&stream->queue);
        if (!command)
            break;
        int fault = run(command);
        discard(command);
        if (fault)
            return fault;
    }
    return OK;
}

static int run(const struct command *command) {
    if (command->what == RECORD) {
        command->mark->reached = true;
        clock_gettime(CLOCK_MONOTONIC, &command->mark->at);
        return OK;
    }
    if (command->what == WAIT)
        return run_stream(command->mark->stream, command->mark);
    if (command->what == REPLAY) {
        for (const struct command *node = command->graph->nodes.first; node; node = node->next) {
            int fault = run(node);
            if (fault)
                return fault;
        }
        return OK;
    }
    if (strikes(&fake.lost_at))
        return lose((int)fake.lost_code);
    if (command->what == LAUNCH)
        return run_launch(command->launch) ? OK : lose(ILLEGAL_ADDRESS);
    unsigned char *to = host_bytes(command->to, command->bytes, true);
    if (!to)
        return lose(ILLEGAL_ADDRESS);
    if (command->what == FILL) {
        memset(to, command->byte, command->bytes);
        return OK;
    }
    const unsigned char *from = host_bytes(command->from, command->bytes, false);
    if (!from)
        return lose(ILLEGAL_ADDRESS);
    memmove(to, from, command->bytes);
    return OK;
}

int run_all(struct context *context) {
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        int fault = run_stream(stream, NULL);
        if (fault)
            return fault;
    }
    return OK;
}

/* What this thread says of its calls; 2 is "relaxed". */
static _Thread_local int thread_mode;

/* A capture of mode 0 forbids every thread what it does not survive, 1 the capturing thread, 2 nobody. */
bool ruins_capture_always(struct context *context) {
    bool ruined = false;
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        bool forbidden = stream->capture_mode == 0 || (stream->capture_mode == 1 && pthread_equal(stream->capture_thread, pthread_self()));
        if (stream->capture != IDLE && forbidden) {
            stream->capture = INVALID;
            ruined = true;
        }
    }
    return ruined;
}

bool ruins_capture(struct context *context) {
    return thread_mode != 2 && ruins_capture_always(context);
}

API cuThreadExchangeStreamCaptureMode(int *mode) {
    STARTED;
    if (*mode < 0 || *mode > 2)
        return INVALID_VALUE;
    int before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return OK;
}

static int ruin(struct stream *stream) {
    stream->capture = INVALID;
    return CAPTURE_UNSUPPORTED;
}

/* Queues a command, or records it. */
static int submit(struct stream *stream, struct command command) {
    if (stream->capture == INVALID)
        return CAPTURE_INVALIDATED;
    if (stream->capture == RECORDING && strikes(&fake.capture_allocates_at)) {
        /* As where a library allocates behind the caller's back. */
        stream->capture = INVALID;
        return CAPTURE_UNSUPPORTED;
    }
    struct command *queued = malloc(sizeof *queued);
    *queued = command;
    push(stream->capture == RECORDING ? &stream->recorded : &stream->queue, queued);
    return OK;
}

int submit_launch(struct stream *stream, struct launch *launch) {
    int answer = submit(stream, (struct command){.what = LAUNCH, .launch = launch});
    if (answer)
        let_go_of_launch(launch);
    return answer;
}

API cuStreamCreate(struct stream **out, unsigned flags) {
    IN_CONTEXT;
    if (flags > 1)
        return INVALID_VALUE;
    struct stream *made = calloc(1, sizeof *made);
    made->context = context;
    made->next = context->streams;
    *out = context->streams = made;
    return OK;
}

API cuStreamDestroy_v2(struct stream *stream) {
    IN_CONTEXT;
    for (struct stream **link = &context->streams; *link; link = &(*link)->next)
        if (*link == stream) {
            /* A real one goes on until its work is done; nobody can tell the difference but by waiting for an event of it. */
            int fault = run_stream(stream, NULL);
            *link = stream->next;
            clear(&stream->queue);
            clear(&stream->recorded);
            free(stream);
            return fault;
        }
    return INVALID_HANDLE;
}

API cuStreamSynchronize(struct stream *stream) {
    IN_CONTEXT;
    if (stream->capture != IDLE)
        return ruin(stream);
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    return run_stream(stream, NULL);
}

API cuEventCreate(struct event **out, unsigned flags) {
    IN_CONTEXT;
    /* Blocking waits are the one flag that is played: nothing spins here. */
    if (flags > 1)
        return INVALID_VALUE;
    *out = calloc(1, sizeof **out);
    return OK;
}

API cuEventDestroy_v2(struct event *event) {
    IN_CONTEXT;
    let_go_of_mark(event->mark);
    free(event);
    return OK;
}

API cuEventRecord(struct event *event, struct stream *stream) {
    IN_CONTEXT;
    if (stream->capture != IDLE)
        return ruin(stream);
    let_go_of_mark(event->mark);
    event->mark = calloc(1, sizeof *event->mark);
    *event->mark = (struct mark){.holders = 2, .stream = stream};
    return submit(stream, (struct command){.what = RECORD, .mark = event->mark});
}

API cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    IN_CONTEXT;
    if (flags)
        return INVALID_VALUE;
    if (stream->capture != IDLE)
        return ruin(stream);
    if (!event->mark || event->mark->reached)
        return OK;
    event->mark->holders++;
    return submit(stream, (struct command){.what = WAIT, .mark = event->mark});
}

API cuEventQuery(struct event *event) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    if (!event->mark || event->mark->reached)
        return OK;
    struct command *next = pop(&event->mark->stream->queue);
    int fault = next ? run(next) : OK;
    if (next)
        discard(next);
    return fault ? fault : event->mark->reached ? OK : NOT_READY;
}

API cuEventSynchronize(struct event *event) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    return event->mark && !event->mark->reached ? run_stream(event->mark->stream, event->mark) : OK;
}

API cuEventElapsedTime(float *milliseconds, struct event *start, struct event *end) {
    IN_CONTEXT;
    if (!start->mark || !end->mark)
        return INVALID_HANDLE;
    if (!start->mark->reached || !end->mark->reached)
        return NOT_READY;
    const struct timespec from = start->mark->at, to = end->mark->at;
    *milliseconds = (float)((double)(to.tv_sec - from.tv_sec) * 1e3 + (double)(to.tv_nsec - from.tv_nsec) / 1e6);
    return OK;
}

API cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, struct stream *stream) {
    IN_CONTEXT;
    if (!host_bytes(to, bytes, true) || !host_bytes(from, bytes, false))
        return INVALID_VALUE;
    return submit(stream, (struct command){.what = COPY, .to = to, .from = from, .bytes = bytes});
}

API cuMemsetD8Async(uint64_t to, unsigned char byte, size_t bytes, struct stream *stream) {
    IN_CONTEXT;
    if (!host_bytes(to, bytes, true))
        return INVALID_VALUE;
    return submit(stream, (struct command){.what = FILL, .to = to, .byte = byte, .bytes = bytes});
}

API cuStreamBeginCapture_v2(struct stream *stream, int mode) {
    IN_CONTEXT;
    if (stream->capture != IDLE || mode < 0 || mode > 2)
        return INVALID_VALUE;
    if (fake.capture_fails && !strcmp(fake.capture_fails, "begin"))
        return NOT_SUPPORTED;
    stream->capture = RECORDING;
    stream->capture_mode = mode;
    stream->capture_thread = pthread_self();
    return OK;
}

API cuStreamEndCapture(struct stream *stream, struct graph **graph) {
    IN_CONTEXT;
    *graph = NULL;
    if (stream->capture == IDLE)
        return CAPTURE_UNMATCHED;
    bool whole = stream->capture == RECORDING && !(fake.capture_fails && !strcmp(fake.capture_fails, "end"));
    stream->capture = IDLE;
    if (!whole) {
        clear(&stream->recorded);
        return CAPTURE_INVALIDATED;
    }
    *graph = calloc(1, sizeof **graph);
    for (struct command *node; (node = pop(&stream->recorded));) {
        node->next = NULL;
        push(&(*graph)->nodes, node);
    }
    return OK;
}

API cuGraphGetNodes(struct graph *graph, void **nodes, size_t *count) {
    STARTED;
    if (nodes)
        return NOT_SUPPORTED;
    *count = graph->nodes.count;
    return OK;
}

API cuGraphInstantiateWithFlags(struct graph_exec **out, struct graph *graph, unsigned long long flags) {
    IN_CONTEXT;
    if (flags)
        return INVALID_VALUE;
    if (fake.capture_fails && !strcmp(fake.capture_fails, "instantiate"))
        return OUT_OF_MEMORY;
    *out = calloc(1, sizeof **out);
    (*out)->holders = 1;
    for (const struct command *node = graph->nodes.first; node; node = node->next) {
        struct command *copied = malloc(sizeof *copied);
        *copied = *node;
        copied->next = NULL;
        if (copied->launch)
            hold_launch(copied->launch);
        push(&(*out)->nodes, copied);
    }
    return OK;
}

API cuGraphDestroy(struct graph *graph) {
    STARTED;
    clear(&graph->nodes);
    free(graph);
    return OK;
}

API cuGraphLaunch(struct graph_exec *graph, struct stream *stream) {
    IN_CONTEXT;
    if (stream->capture != IDLE)
        return ruin(stream);
    graph->holders++;
    return submit(stream, (struct command){.what = REPLAY, .graph = graph});
}

API cuGraphExecDestroy(struct graph_exec *graph) {
    IN_CONTEXT;
    if (ruins_capture(context))
        return CAPTURE_UNSUPPORTED;
    let_go_of_exec(graph);
    return OK;
}
