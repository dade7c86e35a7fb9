/* Gaussian noise on a CPU: Box-Muller and the addition in one pass over a block of the cipher's words.

   Its plain twin is randomness.py (_one_draw, _noisy_plain): the same words make the same numbers. The polynomials are
   gpu_noise.py's. No branch depends on the words, so that time tells nothing of them. Called by cpu_noise.py.
*/
#include <math.h>
#include <stdint.h>
#include <string.h>

#define PIECE 256 /* pairs at a time: they stay in the nearest cache */

/* One version for each generation of processors, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define EVERY_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_PROCESSOR
#endif

#if defined(_WIN32)
#define EXPORTED __declspec(dllexport)
#else
#define EXPORTED __attribute__((visibility("default")))
#endif

typedef struct {
    const void *value; /* float or double, as ``wide`` says */
    float *out;
    int64_t first, size; /* its numbers' places among those of all tensors */
    double scale;
} Tensor;

static inline double number(uint64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint64_t bits_of(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* A whole number below 2^52, and any of 64 bits rounded once: not every processor can convert several at a time. */
static inline double small(uint64_t w) { return number(w | 0x4330000000000000) - 0x1p52; }

static inline double whole(uint64_t w) {
    return (number(w >> 32 | 0x4530000000000000) - 0x1.00000001p84) + number((w & 0xFFFFFFFF) | 0x4330000000000000);
}

/* sqrt(-2 ln u) for u = word 2^-63 + (more + 1/2) 2^-95, which is never 0. */
static inline double radius(uint64_t word, uint32_t more) {
    double v = whole(word & INT64_MAX) + (small(more) + 0.5) * 0x1p-32; /* 2^63 u */
    /* v = 2^k m, sqrt(1/2) <= m < sqrt(2): the high word of the root is 0x3FE6A09E; here k + 1024 */
    uint64_t k = ((bits_of(v) >> 32) - 0x3FE6A09E + (1024 << 20)) >> 20;
    double m = number(bits_of(v) - ((k - 1024) << 52));
    /* -ln m = 2 artanh s, s = (1 - m)/(1 + m): 1 - m is exact, so that all digits are right next to 1, too */
    double s = (1.0 - m) / (1.0 + m), x = s * s;
    double p = 0.18183565139770508 + x * (0.15314102172851562 + x * 0.1479548215866089);
    p = 0.28571428744285315 + x * (0.2222219845460327 + x * p);
    p = 2.0 + x * (0.6666666666666724 + x * (0.399999999994167 + x * p));
    return sqrt(2.0 * (s * p + 0.6931471805599453 * (1024.0 + 63.0 - small(k))));
}

EVERY_PROCESSOR
static void draw(const uint64_t *word, const uint64_t *turn, const uint32_t *more, int64_t pairs, double *cosine,
                 double *sine) {
    for (int64_t i = 0; i < pairs; i++) {
        double r = radius(word[i], more[i]);
        /* the turn is a signed number, of 2^-63 half turns: its sign is the sine's */
        uint64_t negative = 0 - (turn[i] >> 63);
        double a = whole((turn[i] ^ negative) - negative) * 0x1p-63, h = 0.5 - a, x = h * h;
        /* sin(pi h) = h p and cos(pi h) = a (1 - a) q, both 0 where they should be */
        double p = 0.00046629970893263817 + x * (-2.1903179003857076e-05 + x * 7.694725354667753e-07);
        p = -0.5992645293194676 + x * (0.08214588657523297 + x * (-0.007370430496523422 + x * p));
        p = 3.141592653589793 + x * (-5.16771278004997 + x * (2.5501640398773393 + x * p));
        double q = 0.0019036697022300883 + x * (-0.00010351522359997034 + x * 4.131827154196799e-06);
        q = -1.2780132969493538 + x * (0.2289978875193276 + x * (-0.025330969594319193 + x * q));
        q = 4.0 - x * (3.739208802178683 + x * q);
        cosine[i] = r * (h * p);
        sine[i] = number(bits_of(r * (a * (1.0 - a) * q)) ^ (negative << 63));
    }
}

EVERY_PROCESSOR
static void add(const double *z, int64_t count, const void *value, int wide, float *out, double scale, double divisor) {
    if (wide)
        for (int64_t i = 0; i < count; i++) out[i] = (float)((((const double *)value)[i] + scale * z[i]) / divisor);
    else
        for (int64_t i = 0; i < count; i++) out[i] = (float)((((const float *)value)[i] + scale * z[i]) / divisor);
}

/* To the numbers at ``place`` and behind, whichever tensors they belong to; ``*at`` is the one looked at last. */
static void spread(const double *z, int64_t place, int64_t count, const Tensor *tensors, int64_t *at, int wide,
                   double divisor) {
    while (count) {
        while (tensors[*at].first + tensors[*at].size <= place) ++*at;
        const Tensor *t = tensors + *at;
        int64_t from = place - t->first, here = t->size - from < count ? t->size - from : count;
        const char *value = (const char *)t->value + from * (wide ? sizeof(double) : sizeof(float));
        add(z, here, value, wide, t->out + from, t->scale, divisor);
        z += here, place += here, count -= here;
    }
}

/* out = (value + scale z)/divisor for the ``count`` numbers from ``start`` on. ``words``: of every pair of numbers its
   64-bit word, then its turn, then 32 bits more. The tensors follow one another and hold all these numbers. */
EXPORTED void clipwise_noisy(const uint8_t *words, int64_t start, int64_t count, const Tensor *tensors, int wide,
                             double divisor) {
    int64_t half = (count + 1) / 2, one = 0, other = 0;
    const uint64_t *word = (const uint64_t *)words;
    const uint64_t *turn = word + half;
    const uint32_t *more = (const uint32_t *)(words + 16 * half);
    double cosine[PIECE], sine[PIECE];
    for (int64_t i = 0; i < half; i += PIECE) {
        int64_t pairs = half - i < PIECE ? half - i : PIECE;
        draw(word + i, turn + i, more + i, pairs, cosine, sine);
        spread(cosine, start + i, pairs, tensors, &one, wide, divisor);
        int64_t rest = count - half - i;
        spread(sine, start + half + i, rest < pairs ? rest : pairs, tensors, &other, wide, divisor);
    }
}
