// Entry points of the lookup of a tensor-train-matrix table. ELEMENT is the type of the cores, LAST_COLUMNS the most columns
// that a row of the last core has (more than a vector: any number).
#ifndef ELEMENT
#define ELEMENT float
#endif
#ifndef LAST_COLUMNS
#define LAST_COLUMNS 16
#endif

namespace comera {

enum Status : int64_t { DONE = 0, OUT_OF_RANGE = 1, TOO_LARGE = 2, NO_MEMORY = 3 };

inline Table read_table(const int64_t* words) {
  Table table{words[0], words[1], words[2], words[3], {}, {}, {}};
  const int64_t* at = words + 4;
  for (int64_t k = 0; k < table.order; k++) table.row_mode[k] = *at++;
  for (int64_t k = 0; k < table.order; k++) table.column_mode[k] = *at++;
  for (int64_t k = 0; k <= table.order; k++) table.rank[k] = *at++;
  return table;
}

// Elements of the vectors that go over slices of the last core.
constexpr int64_t LANES = LAST_COLUMNS <= WIDTH<ELEMENT> / 2 ? WIDTH<ELEMENT> / 2 : WIDTH<ELEMENT>;

// Checks the ids and runs `run(sizes, index)`. KEEP: the index is kept for a backward; else it is that of the lookup,
// if that is still there.
template <bool KEEP, class I, class F>
int64_t with_index(const Table& table, double scale, const I* ids, int64_t count, int64_t* wrong, const F& run) {
  using T = ELEMENT;
  if (!KEEP)
    if (const auto index = recent().take(table, ids, count)) return run(Sizes<T>(table, scale, LANES), *index);
  int64_t smallest, largest;
  bool ascending;
  limits(ids, count, &smallest, &largest, &ascending);
  if (smallest < 0 || largest >= table.rows) {
    *wrong = smallest < 0 ? smallest : largest;
    return OUT_OF_RANGE;
  }
  auto index = std::make_unique<const Index>(make_index(table, ids, count, smallest, largest, ascending));
  const int64_t status = run(Sizes<T>(table, scale, LANES), *index);
  if (KEEP) recent().keep(table, ids, count, std::move(index));
  return status;
}

template <bool KEEP, class F>
int64_t guarded(const Table& table, double scale, const void* ids, int64_t id_bytes, int64_t count, int64_t* wrong,
                const F& run) {
  try {
    if (id_bytes == 4) return with_index<KEEP>(table, scale, (const int32_t*)ids, count, wrong, run);
    return with_index<KEEP>(table, scale, (const int64_t*)ids, count, wrong, run);
  } catch (const TooLarge&) {
    return TOO_LARGE;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

}  // namespace comera

// words: order, rows, columns, zero row or -1, row modes, column modes, ranks. Nothing is written unless all ids are in
// range; otherwise `wrong` is one that is not.
extern "C" int64_t ttm_lookup(const int64_t* words, double scale, const ELEMENT* packed, const void* ids,
                              int64_t id_bytes, int64_t count, ELEMENT* rows, int64_t threads, int64_t least_work,
                              int64_t most_sums, int64_t* wrong) {
  using namespace comera;
  const Table table = read_table(words);
  return guarded<true>(table, scale, ids, id_bytes, count, wrong, [&](const auto& size, const Index& index) {
    for (int64_t place : index.zero) std::memset(rows + place * table.columns, 0, table.columns * sizeof(ELEMENT));
    const Limits limits{threads, least_work, most_sums};
    if (!index.position.empty()) Forward<ELEMENT, LANES>(size, index, packed, rows, limits).run();
    return (int64_t)DONE;
  });
}

// total: the gradient, as long as the packed vector; every element is written.
extern "C" int64_t ttm_lookup_backward(const int64_t* words, double scale, const ELEMENT* packed, const void* ids,
                                       int64_t id_bytes, int64_t count, const ELEMENT* grad, ELEMENT* total,
                                       int64_t threads, int64_t least_work, int64_t most_sums, int64_t* wrong) {
  using namespace comera;
  const Table table = read_table(words);
  return guarded<false>(table, scale, ids, id_bytes, count, wrong, [&](const auto& size, const Index& index) {
    if (index.position.empty())
      std::memset(total, 0, size.numel * sizeof(ELEMENT));
    else
      Backward<ELEMENT, LANES>(size, index, packed, grad, total, Limits{threads, least_work, most_sums}).run();
    return (int64_t)DONE;
  });
}
